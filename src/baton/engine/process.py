"""The engine process: `python -m baton.engine.process FOLDER`, options as JSON on standard input.

    API process                         engine process
      PUSH  requests  ---- ipc ---->  PULL   Add / Abort / AskStats / Stop
      PULL  outputs   <--- ipc -----  PUSH   EngineInfo, then Accepted / Rejected / Outputs / ...

The sockets live in a private folder. Standard input stays open for as long as the API process
lives; when it ends, so does the engine (see `engine.lifeline`).
"""

from __future__ import annotations

import sys

import msgspec
import zmq

from baton.core.errors import BatonError, QueueFull, RequestError
from baton.core.log import get_logger
from baton.engine.build import build_core, prepare, read_tokenizer
from baton.engine.core import EngineCore
from baton.engine.lifeline import read_options
from baton.engine.messages import (
    Abort,
    Accepted,
    Add,
    AskStats,
    EngineInfo,
    Fatal,
    FromEngine,
    Outputs,
    Rejected,
    StatsReply,
    Stop,
    ToEngine,
)

log = get_logger("engine")


class EngineProcess:
    """Moves messages between the sockets and an EngineCore."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(f"ipc://{folder}/requests")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{folder}/outputs")
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromEngine) -> None:
        """Queue a message for the API process."""
        self._outbox.send(self._encoder.encode(message))

    def close(self) -> None:
        """Give what was sent last, a Fatal perhaps, the time to leave."""
        self._context.destroy(linger=2000)

    def run(self, core: EngineCore) -> None:
        """Serve until Stop. Blocks on the socket when idle, never while there is work."""
        while True:
            idle = not core.has_work()
            if idle:
                core.check()
            while self._inbox.poll(1000 if idle else 0):
                message = self._receive()
                if isinstance(message, Stop):
                    return
                if message is not None:
                    self._handle(core, message)
                idle = False
            if core.has_work():
                outputs = core.step()
                if outputs:
                    self.send(Outputs(outputs))

    def _receive(self) -> ToEngine | None:
        """The next message; None for requests with values of wrong types, which are refused here:
        callers give them to us unseen, and one of them must not end everybody's engine."""
        raw = self._inbox.recv()
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            first = msgspec.msgpack.decode(raw)["requests"][0]["request_id"]
            self.send(Rejected(first, "request", f"the request cannot be read: {error}"))
            return None

    def _handle(self, core: EngineCore, message: Add | Abort | AskStats) -> None:
        if isinstance(message, Add):
            self._add(core, message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                core.abort(request_id)
        else:
            self.send(StatsReply(message.number, core.stats()))

    def _add(self, core: EngineCore, message: Add) -> None:
        first = message.requests[0].request_id
        try:
            core.add(message.requests)
        except RequestError as error:
            self.send(Rejected(first, "request", str(error), error.param, error.code))
        except QueueFull as error:
            self.send(Rejected(first, "full", str(error), retry_after=error.retry_after))
        else:
            self.send(Accepted(first))


def main() -> None:
    """Entry point of the process."""
    folder = sys.argv[1]
    options = read_options()
    process = EngineProcess(folder)
    try:
        prepared = prepare(options)
        core, fingerprint = build_core(prepared, read_tokenizer(prepared), folder)
        process.send(
            EngineInfo(
                model=options.model.model,
                vocab_size=core.config.model.vocab_size,
                max_model_len=core.config.max_model_len,
                fingerprint=fingerprint.to_dict(),
                longest_step=core.scheduler.longest_step(),
            )
        )
        process.run(core)
        core.close()
    except Exception as error:
        if not isinstance(error, BatonError):
            log.exception("engine process failed")
        process.send(Fatal.of(error))
        raise SystemExit(1) from None
    finally:
        process.close()


if __name__ == "__main__":
    main()
