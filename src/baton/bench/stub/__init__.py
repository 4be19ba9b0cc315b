"""A server with no model: OpenAI's API, latencies as programmed, faults on demand."""
