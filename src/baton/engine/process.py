"""The engine process: `python -m baton.engine.process FOLDER`, options as JSON on standard input.

    API process                         engine process
      PUSH  requests  ---- ipc ---->  PULL   Add / Abort / AskStats / Stop
      PULL  outputs   <--- ipc -----  PUSH   EngineInfo, then Accepted / Rejected / Outputs / ...

The sockets live in a private folder. Standard input stays open for as long as the API process
lives; when it ends, so does the engine, whatever happened to its parent.
"""

from __future__ import annotations

import signal
import sys
import time

import msgspec
import zmq

from baton.config.options import EngineOptions
from baton.core.errors import BatonError, QueueFull, RequestError
from baton.core.log import get_logger
from baton.engine.build import build_core, prepare, read_tokenizer
from baton.engine.core import EngineCore
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
from baton.engine.worker import watch_parent

log = get_logger("engine")


class EngineProcess:
    """Moves messages between the sockets and an EngineCore."""

    def __init__(self, folder: str) -> None:
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._inbox.connect(f"ipc://{folder}/requests")
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.connect(f"ipc://{folder}/outputs")
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromEngine) -> None:
        """Queue a message for the API process."""
        self._outbox.send(self._encoder.encode(message))

    def run(self, core: EngineCore) -> None:
        """Serve until Stop. Blocks on the socket when idle, never while there is work."""
        while True:
            idle = not core.has_work()
            while self._inbox.poll(1000 if idle else 0):
                message = self._decoder.decode(self._inbox.recv())
                if isinstance(message, Stop):
                    return
                self._handle(core, message)
                idle = False
            if idle:
                core.check()
            if core.has_work():
                outputs = core.step()
                if outputs:
                    self.send(Outputs(outputs))

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
            core.add_all(message.requests)
        except BatonError as error:
            if isinstance(error, RequestError):
                reply = Rejected(first, "request", str(error), error.param, error.code)
            else:
                wait = error.retry_after if isinstance(error, QueueFull) else 1.0
                reply = Rejected(first, "full", str(error), retry_after=wait)
            self.send(reply)
            return
        self.send(Accepted(first))


def main() -> None:
    """Entry point of the process."""
    begin = time.monotonic()
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOptions)
    watch_parent(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API process decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process = EngineProcess(sys.argv[1])
    try:
        prepared = prepare(options)
        core, fingerprint = build_core(prepared, read_tokenizer(prepared), sys.argv[1])
        process.send(
            EngineInfo(
                model=options.model.model,
                vocab_size=core.config.model.vocab_size,
                max_model_len=core.config.max_model_len,
                page_size=core.config.page_size,
                num_pages=core.config.num_pages,
                max_num_seqs=core.config.max_num_seqs,
                eos_token_ids=list(core.config.model.eos_token_ids),
                fingerprint=fingerprint.to_dict(),
                decisions=[(d.name, d.value, d.reason) for d in core.config.decisions],
                start_seconds=time.monotonic() - begin,
            )
        )
        process.run(core)
        core.close()
    except Exception as error:
        if not isinstance(error, BatonError):
            log.exception("engine process failed")
        process.send(Fatal.of(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
