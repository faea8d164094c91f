"""A minimal discovery run, for experiments that make many."""

from __future__ import annotations

import dataclasses

from seerjax.discovery.config import DiscoverConfig, TinyConfig
from seerjax.engine.engine import EngineConfig
from seerjax.run.config import TrainerConfig

RUN = DiscoverConfig(
  num_steps=2,
  groups_per_step=2,
  group_size=4,
  tiny=TinyConfig(hidden_size=16, num_layers=1, warm_sentences=8),
  engine=EngineConfig(page_size=8, max_sequences=8, max_context=16, row_buckets=(16,)),
  trainer=TrainerConfig(rows_per_micro_batch=64, sequences_per_micro_batch=8),
  numerics=dataclasses.replace(DiscoverConfig().numerics, kv_split=16),
)
