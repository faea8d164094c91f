"""Prometheus metrics of a server."""

from __future__ import annotations

import prometheus_client as prometheus

from seerjax.serve.engine_thread import EngineThread
from seerjax.sleep import states

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
  """Metrics of one server; their names start with `seerjax_`.

  Attributes:
    requests: requests by route and status.
    prompt_tokens: prompt tokens.
    answer_tokens: tokens sent to clients.
    sampled_tokens: tokens sampled by the engines, also for requests that were cancelled.
    first_token: time to first token, in seconds.
    duration: duration of a request, in seconds.
  """

  def __init__(self, thread: EngineThread):
    self._registry = registry = prometheus.CollectorRegistry()
    counter = lambda name, text, *labels: prometheus.Counter(
      f"seerjax_{name}", text, labels, registry=registry
    )
    histogram = lambda name, text: prometheus.Histogram(
      f"seerjax_{name}", text, buckets=SECONDS, registry=registry
    )
    self.requests = counter("requests", "Requests by route and status.", "route", "status")
    self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
    self.answer_tokens = counter("answer_tokens", "Response tokens sent to clients.")
    self.sampled_tokens = counter("sampled_tokens", "Tokens sampled by the engines.", "model")
    self.first_token = histogram("first_token_seconds", "Seconds until the first token.")
    self.duration = histogram("request_seconds", "Seconds per request.")

    def gauge(name: str, text: str, read) -> None:
      prometheus.Gauge(f"seerjax_{name}", text, registry=registry).set_function(read)

    gauge("waiting", "Choices queued for an engine.", lambda: thread.num_waiting)
    gauge("running", "Choices running in an engine.", lambda: thread.num_running)
    gauge("refused", "Requests refused because the queue was full.", lambda: thread.refused)
    contexts = prometheus.Gauge(
      "seerjax_contexts", "Contexts by sleep state.", ["state"], registry=registry
    )
    for state in states.STATES if thread.sleeping else ():
      contexts.labels(state).set_function(lambda state=state: _contexts(thread, state))
    gauge("free_pages", "Free KV pages.", lambda: _free_pages(thread))

  def text(self) -> bytes:
    """Returns the metrics in Prometheus' text format."""
    return prometheus.generate_latest(self._registry)


def _contexts(thread: EngineThread, state: str) -> int:
  return sum(sleeping.num_by_state[state] for sleeping in thread.sleeping.values())


def _free_pages(thread: EngineThread) -> int:
  return sum(
    engine.chunks.free_pages(place)
    for engine in thread.engines.values()
    for place in range(engine.data_parallel_size)
  )
