"""What Triton 3.6 and 3.7 call differently in Gluon."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

#: Waits for all threads of a program, or of the warps that have a role together.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
