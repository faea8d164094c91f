"""Routes are counted token by token, and a route that differs is found."""

from __future__ import annotations

import jax
import numpy as np
import tiny_model

from seerjax import numerics as numerics_lib
from seerjax.layer_kinds import Experts
from seerjax.models import parameters
from seerjax.models.decoder import decide
from seerjax.ops.routing import RoutingConfig
from seerjax.run import routes

ROUTING = RoutingConfig(num_experts=8, num_chosen=3, is_renormalised=True)
MODEL = tiny_model.CONFIG.changed(feed_forward=Experts(routing=ROUTING, expert_size=8))


def test_routes_of_decoding_are_those_of_whole_sequences():
  decoder = decide(MODEL, tiny_model.NUMERICS)
  masters = parameters.init(numerics_lib.key(0), MODEL, decoder.numerics)
  params = parameters.compute_params(jax.tree.map(lambda leaf: leaf * 8, masters), decoder.numerics)
  tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (8, 19)).astype(np.int32)
  lengths = np.asarray([19, 1, 7, 19, 2, 3, 18, 11])
  answers = routes.Answers(tokens, lengths)
  assert routes.compare(params, answers, decoder) == (2 * lengths.sum(), 0)
  assert routes.compare_alone(params, answers, decoder) == (2 * lengths.sum(), 0)
  fewer = routes.Answers(tokens[:3], lengths[:3])
  assert routes.compare(params, fewer, decoder) == (2 * lengths[:3].sum(), 0)
  decoded = routes.decoded_routes(params, tokens, decoder)
  assert decoded.shape == (2, 8, 19, 3)
  assert np.all(np.diff(decoded) > 0) and len(np.unique(decoded)) == 8
  # A twin: other routers choose other experts.
  turned = [{**layer, "router": -layer["router"]} for layer in params["layers"]]
  others = routes.whole_routes({**params, "layers": turned}, tokens, decoder)
  assert np.any(decoded != others, axis=-1).mean() > 0.5
