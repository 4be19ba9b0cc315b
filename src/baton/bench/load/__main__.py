"""A worker process; its pipe's file descriptor is the argument. `Team` starts these."""

import sys
from multiprocessing.connection import Connection

from baton.bench.load.worker import main

main(Connection(int(sys.argv[1])))
