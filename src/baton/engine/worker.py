"""A rank above 0: loads its share, then runs the plans that rank 0 sends. Decides nothing.

Started as `python -m baton.engine.worker RANK SIZE FOLDER DIGEST` (of the tokenizer) with the
engine options as one line of JSON on standard input. When standard input ends, the engine is gone
and so is this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import msgspec
import zmq

from baton.core.errors import BatonError
from baton.core.log import get_logger
from baton.core.step import StepPlan
from baton.engine.build import Group, build_rank, prepare
from baton.engine.executor import PLAN, POISON, PROBE
from baton.engine.lifeline import read_options
from baton.runner.probes import Probe
from baton.runner.runner import Runner

log = get_logger("worker")


def main() -> None:
    """Entry point of the process."""
    rank, size, folder, tokenizer = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    options = read_options()
    context = zmq.Context()
    plans = context.socket(zmq.PULL)
    plans.bind(f"ipc://{folder}/{rank}")
    replies = context.socket(zmq.PUSH)
    replies.connect(f"ipc://{folder}/replies")

    def meet(join: Callable[[], Group]) -> Group:
        replies.send(json.dumps([rank, "joining"]).encode())
        return join()

    try:
        prepared = prepare(options)
        rendezvous = f"file://{folder}/rendezvous"
        built = build_rank(prepared, rank, size, rendezvous, tokenizer=tokenizer, meet=meet)
    except BatonError as error:
        log.error("rank %d: %s", rank, error)
        raise SystemExit(1) from None
    replies.send(json.dumps([rank, built.fingerprint.to_dict()]).encode())
    serve(built.runner, plans)


def serve(runner: Runner, plans: zmq.Socket[bytes]) -> None:
    """Run messages in order, for ever. Results exist on rank 0 already and are dropped here.

    A step that fails ends the process, and with it the engine: a rank that skipped the rest of a
    step would meet its peers' collectives of that step with those of the next.
    """
    while True:
        kind, payload = plans.recv_multipart()
        if kind == PLAN:
            plan = msgspec.msgpack.decode(payload, type=StepPlan)
            try:
                runner.launch(plan).launched()
            except Exception:
                log.exception("step %d failed", plan.step)
                os._exit(1)  # not SystemExit: the device thread may hang in a collective
        elif kind == POISON:
            runner.poison_pages(msgspec.msgpack.decode(payload, type=list[int]))
        else:
            assert kind == PROBE, kind
            runner.probe(msgspec.msgpack.decode(payload, type=Probe))


if __name__ == "__main__":
    main()
