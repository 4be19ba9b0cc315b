"""A rank above 0: loads its share, then runs the plans that rank 0 sends. Decides nothing.

Started as `python -m baton.engine.worker RANK SIZE FOLDER DIGEST` (of the tokenizer) with the
engine options as one line of JSON on standard input. When standard input ends, the engine is gone
and so is this process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading

import msgspec
import zmq

from baton.config.options import EngineOptions
from baton.core.errors import BatonError
from baton.core.log import get_logger
from baton.core.step import StepPlan
from baton.engine.build import build_rank, prepare
from baton.engine.executor import PLAN, POISON, PROBE
from baton.runner.probes import Probe
from baton.runner.runner import Runner

log = get_logger("worker")


def watch_parent(folder: str) -> None:
    """End this process as soon as standard input ends. `folder` is the private one that the
    parent made: it goes too, since a parent that was killed could not remove it."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: a thread in it may not be there at exit
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="baton-lifeline", daemon=True).start()


def main() -> None:
    """Entry point of the process."""
    rank, size, folder, tokenizer = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOptions)
    watch_parent(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    plans = context.socket(zmq.PULL)
    plans.connect(f"ipc://{folder}/{rank}")
    replies = context.socket(zmq.PUSH)
    replies.connect(f"ipc://{folder}/replies")
    try:
        prepared = prepare(options)
        built = build_rank(prepared, rank, size, f"file://{folder}/rendezvous", tokenizer=tokenizer)
    except BatonError as error:
        log.error("rank %d: %s", rank, error)
        raise SystemExit(1) from None
    replies.send(json.dumps([rank, built.fingerprint.to_dict()]).encode())
    serve(built.runner, plans)
    built.close()


def serve(runner: Runner, plans: zmq.Socket[bytes]) -> None:
    """Run messages in order until STOP. Results exist on rank 0 already and are dropped here."""
    while True:
        kind, payload = plans.recv_multipart()
        if kind == PLAN:
            ticket = runner.launch(msgspec.msgpack.decode(payload, type=StepPlan))
            try:
                ticket.wait()
            except Exception as error:  # rank 0 sees the same failure and fails the step's requests
                log.error("step failed: %s", error)
        elif kind == POISON:
            runner.poison_pages(msgspec.msgpack.decode(payload, type=list[int]))
        elif kind == PROBE:
            seqs, chunk, length = msgspec.msgpack.decode(payload, type=tuple[int, int, int])
            runner.probe(Probe(seqs, chunk, length))
        else:
            runner.close()
            return


if __name__ == "__main__":
    main()
