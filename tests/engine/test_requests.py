"""Placement of requests on instances, and errors for unknown requests."""

from __future__ import annotations

import jax
from word_engine import CONFIG, NUMERICS, SIZES, params, request

from seerjax import parallel
from seerjax.engine.engine import Engine
from seerjax.models.loading import Model


def test_requests_go_to_the_instance_with_the_fewest_and_groups_stay_together():
  mesh = parallel.make_mesh(data_parallel_size=2)
  engine = Engine(
    Model(CONFIG, params(), NUMERICS),
    config=SIZES,
    key=jax.random.key(0),
    mesh=mesh,
  )
  for name, group in (("a", "g"), ("b", "g"), ("c", ""), ("d", "h"), ("e", "h"), ("f", "g")):
    engine.add_request(request(name, group=group))
  places = [[s.request.request_id for s in waiting] for waiting in engine._requests.waiting]
  assert places == [["a", "b", "f"], ["c", "d", "e"]]
