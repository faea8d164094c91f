"""PEFT reads our adapters and we read PEFT's: a small random model gives equal results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seerjax import numerics as numerics_lib
from seerjax.models import flax_module, huggingface, lora, peft
from seerjax.models.decoder import decide

torch = pytest.importorskip("torch", reason="parity needs the optional torch (CPU)")
transformers = pytest.importorskip("transformers", reason="parity needs the optional transformers")
theirs = pytest.importorskip("peft", reason="parity needs the optional peft")

NUMERICS = numerics_lib.NumericsConfig(
  row_tile=8, query_tile=4, slot_tile=2, kv_split=32, reduction_shards=2
)
TOKENS = np.random.default_rng(1).integers(0, 94, (2, 24))


SIZES = dict(
  vocab_size=94, hidden_size=24, intermediate_size=72, num_hidden_layers=2,
  num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=True)


@pytest.fixture(params=["Qwen3", "Qwen3Moe"])
def base(tmp_path, request):
  """Returns the directory of a random model of transformers."""
  torch.manual_seed(0)
  sizes = SIZES | (EXPERTS if request.param == "Qwen3Moe" else {})
  config = getattr(transformers, f"{request.param}Config")(**sizes)
  model = getattr(transformers, f"{request.param}ForCausalLM")(config).eval().float()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      parameter.copy_((1 if "norm" in name else 0) + 0.15 * torch.randn_like(parameter))
  model.save_pretrained(tmp_path / "base")
  return tmp_path / "base"


def ours(base, adapter, scale):
  params, config = huggingface.load(base, NUMERICS)
  params = lora.attach(params, adapter, scale)
  logits = lambda params: flax_module.logits_of(
    params, jnp.asarray(TOKENS, jnp.int32), decoder=decide(config, NUMERICS)
  )
  return np.asarray(jax.jit(logits)(params))


def with_peft(base, adapter):
  model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
  model = theirs.PeftModel.from_pretrained(model, adapter).eval()
  with torch.no_grad():
    return model(torch.asarray(TOKENS)).logits.numpy()


def error(found, expected):
  return np.abs(found - expected).max() / np.abs(expected).max()


def test_peft_reads_ours_and_says_the_same(base, tmp_path):
  config = huggingface.load_config(base)
  rng = np.random.default_rng(0)
  adapter = jax.tree.map(
    lambda s: jnp.asarray(0.3 * rng.standard_normal(s.shape), jnp.float32),
    lora.shapes(config, NUMERICS, 3),
  )
  peft.save(tmp_path / "adapter", adapter, config, scale=0.7, base=str(base))
  zero = jax.tree.map(jnp.zeros_like, adapter)
  found = with_peft(base, tmp_path / "adapter")
  assert error(ours(base, adapter, 0.7), found) < 2e-5
  assert error(ours(base, zero, 0.7), found) > 1e-2


@pytest.mark.parametrize(
  "modules",
  [
    ["q_proj", "v_proj", "down_proj"],
    ["q_proj", "gate_proj", "up_proj"],
    ["k_proj", "gate_proj", "up_proj", "down_proj"],
    "all-linear",
  ],
  ids=str,
)
def test_we_read_what_peft_writes_and_say_the_same(base, tmp_path, modules):
  model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
  settings = theirs.LoraConfig(
    r=4, lora_alpha=6, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False
  )
  torch.manual_seed(1)
  theirs.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
  config = huggingface.load_config(base)
  if modules == "all-linear" and config.routings:
    with pytest.raises(ValueError, match="target_parameters: got 'gate.weight', expected some of"):
      peft.load(tmp_path / "adapter", config, NUMERICS)
    return
  adapter, scale = peft.load(tmp_path / "adapter", config, NUMERICS)
  assert scale == 1.5
  assert error(ours(base, adapter, scale), with_peft(base, tmp_path / "adapter")) < 2e-5
