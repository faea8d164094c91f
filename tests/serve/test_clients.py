"""OpenAI-compatible client libraries, in their default modes, against a model with tools.

The libraries and their dependencies are installed into a separate environment.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import venv

import chat_forms
import pytest

from seerjax import numerics as numerics_lib
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import loading
from seerjax.models.tokenizer import Tokenizer
from seerjax.serve import server
from seerjax.serve.config import ServeConfig
from seerjax.serve.family import Family
from seerjax.serve.service import Service

PACKAGES = ("instructor==1.17.0", "openai==3.3.0", "pydantic-ai-slim[openai]==2.38.0")
# The request to both: a record, through each library's own tool format.
RECORD = """
import sys
from typing import Annotated, Literal
import pydantic

class Fruit(pydantic.BaseModel):
  "A fruit that is sold."
  model_config = pydantic.ConfigDict(extra="forbid")  # Nano would never come to an end.
  kind: Literal["apple", "pear"]
  count: Annotated[int, pydantic.Field(ge=0, le=9)]
  fresh: bool
  notes: Annotated[list[Literal["red", "green"]], pydantic.Field(max_length=2)]
"""
PROGRAMS = {
  "instructor": """
import instructor, openai
client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1], api_key="none"))
for seed in range(2):
  print(client.chat.completions.create(
    model="nano", response_model=Fruit, messages=[{"role": "user", "content": "Sell!"}],
    seed=seed, max_tokens=200, max_retries=0,
  ).model_dump_json())
""",
  "instructor, streamed": """
import instructor, openai
client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1], api_key="none"))
for seed in range(2):
  *_, last = client.chat.completions.create_partial(
    model="nano", response_model=Fruit, messages=[{"role": "user", "content": "Sell!"}],
    seed=seed, max_tokens=200, max_retries=0,
  )
  print(Fruit.model_validate(last.model_dump()).model_dump_json())
""",
  "pydantic-ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
agent = Agent(OpenAIChatModel("nano", provider=provider), output_type=Fruit, retries=0)
for seed in range(2):
  print(agent.run_sync("Sell!", model_settings={"seed": seed, "max_tokens": 200})
        .output.model_dump_json())
""",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> pathlib.Path:
  """The interpreter of an environment that has the libraries."""
  folder = tmp_path_factory.mktemp("clients")
  venv.create(folder, with_pip=True)
  found = folder / "bin" / "python"
  done = subprocess.run(
    [found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES],
    capture_output=True, text=True, timeout=1200,
  )  # fmt: skip
  if done.returncode:
    pytest.skip(f"no index has {', '.join(PACKAGES)} for this Python: {done.stderr[-200:]}")
  return found


@pytest.fixture(scope="module")
def url():
  model = loading.load_model("nano")
  assert model.tokenizer is not None
  fields = {**vars(model.tokenizer), "chat_template": chat_forms.QWEN25}
  fields = {name: fields[name] for name in Tokenizer.__dataclass_fields__}
  model = loading.Model(model.config, model.params, model.numerics, Tokenizer(**fields))
  key = numerics_lib.key(0)
  engine = Engine(model, config=EngineConfig(max_model_len=2048, max_num_seqs=2), key=key)
  family = Family("nano", model, engine, key=key)
  with server.running(Service(family.models, ServeConfig(port=0))) as found:
    yield f"{found}/v1"


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_library_in_its_default_mode_gets_the_record_that_it_asks_for(python, url, name):
  program = RECORD + PROGRAMS[name]
  runs = [
    subprocess.run([python, "-c", program, url], capture_output=True, text=True, timeout=900)
    for _ in range(2)
  ]
  assert not any(one.returncode for one in runs), runs[0].stderr[-3000:]
  first, second = (one.stdout.splitlines() for one in runs)
  assert len(first) == 2 and first == second  # Equal seeds are equal answers.
  for line in first:
    record = json.loads(line)
    assert record["kind"] in ("apple", "pear") and 0 <= record["count"] <= 9
