"""Contexts over HTTP: registration, idle-time sleep, questions, and survival of a kill."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import logging
import pathlib
import random
import signal
import time
from typing import Any

import openai
import pytest
from served_process import Process
import serving
import sleep_prompts
from sleep_prompts import user
import word_engine

import seerjax
from seerjax.commands import serve as serve_main
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.engine.step_times import StepTimes
from seerjax.records import lines
from seerjax.serve import protocol, served as served_lib, server
from seerjax.serve.config import ServeConfig
from seerjax.serve.refusals import Refusal
from seerjax.serve.served import Served
from seerjax.serve.service import Service
from seerjax.serve.sleeping import Sleeping
from seerjax.sleep import contexts as contexts_lib, prompts as prompts_lib, runner as runner_lib
from seerjax.sleep.contexts import Contexts, Identity
from seerjax.sleep.planner import PlannerConfig
from seerjax.sleep.runner import Runner, RunnerConfig
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.tasks.stateful import StatefulConfig, StatefulWordProblems

TINY = Identity(weights="w", tokenizer="t", template="c")
SLEEP = RunnerConfig(num_jobs=2, max_rethinks=2, sleep_tokens=6, temperature=0.9, seed=4)
EAGER = PlannerConfig(num_trials=1000)
TEXT = "Ana has 2 pens."
# Tokens of the clients.
KEYS = {"tok-a": "ana", "tok-b": "bo"}
SECRET = ServeConfig(port=0, token="tok-server", tenants=KEYS)


PROMPTS = dataclasses.replace(sleep_prompts.PROMPTS, joined=lambda texts: " ".join(texts)[:12])


@contextlib.contextmanager
def running(
  directory: pathlib.Path,
  config: ServeConfig = serving.ANY_PORT,
  *,
  has_drafts: bool = False,
  num_pages: int = word_engine.SIZES.num_pages,
) -> Iterator[tuple[Service, str]]:
  sizes = dataclasses.replace(word_engine.SIZES, pinned_pages=4, num_pages=num_pages)
  engine = word_engine.make_engine(sizes)
  engine.step_times = StepTimes(rows=(1, 64), seconds=(1.0, 1.0))
  if has_drafts:
    engine.drafter = SuffixDrafter(budget=None)
  tiny = Served(name="tiny", engine=engine, fingerprint="fp_test")
  sleeping = Sleeping(directory, engine, PROMPTS, identity=TINY, config=SLEEP, planner_config=EAGER)
  service = Service({"tiny": tiny}, config, sleeping={"tiny": sleeping})
  with server.running(service) as url:
    yield service, url


@contextlib.contextmanager
def client(url: str, token: str = "") -> Iterator[Any]:
  headers = {"authorization": f"Bearer {token}"} if token else {}
  with serving.client(url, headers=headers) as found:
    yield found


def register(asked: Any, name: str = "c", text: str = TEXT, **others: Any) -> dict[str, Any]:
  answer = asked.post("/v1/contexts", json={"name": name, "text": text, **others})
  assert answer.status_code == 200, answer.text
  return answer.json()


def slept(asked: Any, name: str = "c", num: int = 2) -> dict[str, Any]:
  """Returns a context once it has `num` rewrites, read or in quarantine."""
  for _ in range(3000):
    found = asked.get(f"/v1/contexts/{name}").json()
    if len(found["rewrites"]) + len(found["quarantine"]) >= num:
      return found
    time.sleep(0.02)
  raise AssertionError(f"got {found} after a minute")


def offline(directory: pathlib.Path, text: str = TEXT) -> dict[int, tuple[str, int, int]]:
  """Returns the rewrites of a runner on an otherwise idle engine, by job."""
  with Contexts(directory, identity=TINY) as registry:
    engine = word_engine.make_engine()
    runner = Runner(engine, registry, PROMPTS, config=SLEEP, planner_config=EAGER)
    ids = word_engine.TOKENIZER.encode(text, special_tokens_as_text=True)
    registry.register("mine", "c", text, ids, step=0)
    runner_lib.sleep_to_end(runner, engine, ["mine"], step=0)
    found = registry.rewrites("mine", "c", step=0)
    return {one.job: (one.text, one.seed, one.num_tokens) for one in found}


def chat(asked: Any, context: str = "c", question: str = "Who?", **fields: Any) -> Any:
  body = {"messages": [{"role": "user", "content": question}], "context": context}
  return asked.post("/v1/chat/completions", json={**body, "max_tokens": 8, "seed": 3, **fields})


def prompt_of(text: str, question: str = "Who?") -> tuple[int, ...]:
  return tuple(word_engine.TOKENIZER.chat_ids([*PROMPTS.wake(question, "", text, 0)]))


def test_a_context_is_asked_slept_for_and_asked_again(tmp_path):
  expected = offline(tmp_path / "offline")
  assert len(expected) == 2
  with running(tmp_path / "served", has_drafts=True) as (service, url), client(url) as asked:
    registered = register(asked)
    assert (registered["version"], registered["name"]) == (1, "c")
    first = chat(asked).json()
    found = slept(asked)
    assert {one["job"]: (one["text"], one["seed"], one["num_tokens"])
            for one in found["rewrites"]} == expected  # fmt: skip
    # OpenAI's own client names it in `extra_body`.
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as own:
      answer = own.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Who?"}], seed=3, max_tokens=8,
        logprobs=True, extra_body={"context": "c"},
      )  # fmt: skip
    again = answer.model_dump()
    assert again["context"] == {
      "name": "c", "id": registered["id"], "version": 1, "rewrites": [0, 1],
    }  # fmt: skip
    notes = PROMPTS.joined([text for text, _, _ in expected.values()])
    alone = serving.answer_alone(
      serving.engine_alone(), prompt_of(notes), 3,
      served_lib.SamplingParams(max_tokens=8, stop_token_ids=word_engine.TOKENIZER.eos_ids),
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.message.content == alone.text
    assert [row.logprob for row in choice.logprobs.content] == alone.behaviour_logprobs.tolist()
    # Before sleep the answer uses the context's text, afterwards its shorter notes.
    was = first["usage"]["prompt_tokens"]
    assert was in (len(prompt_of(TEXT)), len(prompt_of(notes)))
    assert answer.usage.prompt_tokens == len(prompt_of(notes))
    assert service.sleeping["tiny"].runner.jobs.kept == 2
    listed = asked.get("/v1/contexts").json()["data"]
    assert [one["num_rewrites"] for one in listed] == [2]
    forgotten = asked.delete("/v1/contexts/c").json()
    assert forgotten == {"object": "context", "name": "c", "deleted": True}
    assert chat(asked).status_code == 404 and asked.get("/v1/contexts").json()["data"] == []
  # After shutdown the registry keeps registered contexts, and nothing of deleted ones.
  with Contexts(tmp_path / "served", identity=TINY) as registry:
    assert registry.namespaces(step=registry.last_step) == ()


def test_a_context_says_what_became_of_its_sleep(tmp_path, caplog):
  caplog.set_level(logging.INFO, "seerjax.serve")
  with running(tmp_path) as (service, url), client(url) as asked:
    gauge = lambda: [
      line.partition("} ") for line in asked.get("/metrics").text.splitlines()
      if line.startswith("seerjax_contexts{")
    ]  # fmt: skip
    assert [value for _, _, value in gauge()] == ["0.0"] * 5
    registered = register(asked)
    assert (registered["state"], registered["state_reason"][:22]) == (
      "queued", "0 of 2 rewrites finish",
    )  # fmt: skip
    slept(asked)
    found = asked.get("/v1/contexts/c").json()
    # Six tokens are too few for this model.
    assert found["state"] == "truncated"
    assert "2 cut off at the token limit (--sleep_tokens)" in found["state_reason"]
    assert all(one["is_truncated"] for one in found["rewrites"])
    listed = asked.get("/v1/contexts").json()["data"]
    assert [one["state"] for one in listed] == ["truncated"]
    counts = {head.split('"')[1]: float(value) for head, _, value in gauge()}
    assert counts == {"queued": 0, "running": 0, "skipped": 0, "truncated": 1, "done": 0}
    messages = [r.getMessage() for r in caplog.records if r.getMessage().startswith("context ")]
    name = f"context {registered['id'][:12]} version=1 "
    states = [line.removeprefix(name).partition(":")[0] for line in messages]
    assert states == ["running", "truncated"]
    # An edited context is another version, which begins anew; one that cannot be slept is skipped.
    service.thread.call(service.sleeping["tiny"].give_up, lambda _: None)
    edited = register(asked, text="Bo has 3 pens.")
    assert (edited["state"], edited["version"]) == ("skipped", 2)
    assert "sleep-time compute is off because steps failed" in edited["state_reason"]
  # Truncation is still recorded after a restart.
  with running(tmp_path) as (_, url), client(url) as asked:
    slept(asked)
    assert asked.get("/v1/contexts/c").json()["state"] == "truncated"


@pytest.mark.thorough
def test_tenants_share_nothing_and_know_nothing_of_one_another(tmp_path):
  # Enough room, so that running sleep does not evict the pages that must be reused.
  with (
    running(tmp_path, SECRET, num_pages=65) as (service, url),
    contextlib.ExitStack() as stack,
  ):
    ana, bo, own = (
      stack.enter_context(client(url, token)) for token in ("tok-a", "tok-b", "tok-server")
    )
    for who in (ana, own):
      register(who)
      slept(who)
    for act in (
      bo.get("/v1/contexts/c"), bo.delete("/v1/contexts/c"), chat(bo), bo.get("/v1/contexts/no"),
    ):  # fmt: skip
      assert act.status_code == 404
      message = act.json()["error"]["message"]
      assert message.startswith("context: got '")
      assert "which this caller has not registered" in message
    assert bo.get("/v1/contexts").json()["data"] == []
    assert chat(ana).json()["choices"][0]["message"] == chat(own).json()["choices"][0]["message"]
    assert ana.delete("/v1/contexts/c").status_code == 200
    assert own.get("/v1/contexts/c").json()["version"] == 1
    # The same for pages: one client's prompt makes another's no faster.
    engine, reused = service.models["tiny"].engine, []
    for who in (ana, bo, ana, own):
      before = engine.counters.reused_tokens
      body = {"prompt": [5] * 20, "max_tokens": 2, "seed": 1}
      assert who.post("/v1/completions", json=body).status_code == 200
      reused.append(engine.counters.reused_tokens - before)
    assert reused[2] > 0 and reused[:2] == [0, 0] and reused[3] == 0
    for path in ("/metrics", "/v1/weights"):
      refused = bo.get(path) if path == "/metrics" else bo.post(path, json={"directory": "x"})
      assert refused.status_code == 403
      assert "got a tenant's token, expected the server's own" in refused.text
    with client(url, "tok-c") as stranger:
      assert stranger.get("/v1/contexts").status_code == 401


def test_an_edit_ends_what_was_made_and_a_question_that_waited_is_asked_again(tmp_path):
  with running(tmp_path) as (service, url), client(url) as asked:
    register(asked)
    slept(asked)
    sleeping = service.sleeping["tiny"]
    plan = served_lib.plan(
      protocol.chat({"messages": [*user("Who?")], "context": "c", "max_tokens": 4}),
      service.models["tiny"],
      job_id="late",
      max_answer_tokens=8,
      reading=sleeping.read("", "c", "Who?"),
    )
    assert register(asked, text="Ana has 3 pens.")["version"] == 2
    assert sleeping.runner.jobs.kept == 2 and plan.reading is not None
    found: list[Any] = []
    job = served_lib_job(plan, found.append)
    service.thread.submit(job)
    while not found:
      time.sleep(0.01)
    assert isinstance(found[0], Refusal) and found[0].status == 409
    assert "got a question about version 1 of 'c', which changed or was removed" in found[0].message
    assert all(one["policy_version"] == 0 for one in slept(asked)["rewrites"])
    assert chat(asked).json()["context"]["version"] == 2
    assert register(asked, ttl_steps=1)["steps_left"] == 1
    chat(asked, context="", question="How many?")  # Some steps.
    assert chat(asked).status_code == 404


def served_lib_job(plan: Any, deliver: Any) -> Any:
  from seerjax.serve.engine_thread import Job

  return Job(
    job_id="late", client="", model="tiny", requests=plan.requests, masks=plan.masks,
    reading=plan.reading, deliver=deliver,
  )  # fmt: skip


@pytest.mark.thorough
def test_who_waits_has_a_row_while_all_places_and_pages_are_slept_in(tmp_path):
  with running(tmp_path) as (service, url), client(url) as asked:
    for name in "abcdef":
      register(asked, name=name, text=f"{name} has 2 pens and 4 cups.")
    body = {"prompt": [7] * 30, "max_tokens": 20, "seed": 1}
    answer = asked.post("/v1/completions", json={**body, "logprobs": 0}).json()
    waits = service.models["tiny"].engine.counters.waits
    alone = serving.answer_alone(
      serving.engine_alone(), (7,) * 30, 1,
      served_lib.SamplingParams(max_tokens=20, stop_token_ids=word_engine.TOKENIZER.eos_ids),
    )  # fmt: skip
    assert answer["choices"][0]["text"] == alone.text and waits == 0
    for name in "abcdef":
      slept(asked, name)


def _slept_alone(
  directory: pathlib.Path, identity: Identity, texts: dict[str, str]
) -> dict[tuple[str, int], Any]:
  """Returns the rewrites of a runner on an otherwise idle engine, by context and job."""
  model = seerjax.load_model("nano-sleep")
  engine = Engine(model, config=EngineConfig(max_model_len=256, max_num_seqs=4))
  config = RunnerConfig(num_jobs=3, sleep_tokens=64)
  with Contexts(directory, identity=identity) as registry:
    runner = Runner(
      engine, registry, prompts_lib.taught(StatefulWordProblems()), config=config,
      planner_config=EAGER,
    )  # fmt: skip
    for name, text in texts.items():
      ids = engine.tokenizer.encode(text, special_tokens_as_text=True)
      registry.register("mine", name, text, ids, step=0)
    runner_lib.sleep_to_end(runner, engine, ["mine"], step=0)
    return {
      (name, one.job): (one.text, one.seed, one.num_tokens)
      for name in texts
      for found in (registry.rewrites, registry.quarantine)
      for one in found("mine", name, step=0)
    }


@pytest.mark.long
def test_a_process_that_is_killed_asleep_loses_the_jobs_in_work_at_most(
  tmp_path, seed, tell_events
):
  rng, directory = random.Random(seed), tmp_path / "contexts"
  task = StatefulWordProblems(config=StatefulConfig(num_questions=3))
  stories = {f"c{number}": task.contexts("heldout")[number] for number in range(24)}
  texts = {name: story.text for name, story in stories.items()}
  questions = {f"c{number}": task.questions("heldout", number)[0].question for number in range(8)}
  command = (
    "nano-sleep", "--is_taught", f"--contexts={directory}", "--sleepers=3", "--sleep_tokens=64",
    "--max_model_len=256", "--max_num_seqs=4",
  )  # fmt: skip
  events: collections.Counter[str] = collections.Counter()
  seen: dict[tuple[str, int], Any] = {}
  expected: dict[tuple[str, int], Any] = {}

  def look(asked: Any) -> None:
    for name in texts:
      body = asked.get(f"/v1/contexts/{name}").json()
      for one in (*body["rewrites"], *body["quarantine"]):
        seen[name, one["job"]] = one["text"], one["seed"], one["num_tokens"]

  def tokens_of(asked: Any, name: str) -> int:
    """Asks about a context; returns the tokens read and written."""
    answer = chat(asked, name, questions[name], max_tokens=64, temperature=0)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["total_tokens"]

  first = last = 0
  for life in range(3):
    process = Process(tmp_path, *command)
    try:
      with client(process.url) as asked:
        if not life:
          for name, text in texts.items():
            register(asked, name=name, text=text)
            first += tokens_of(asked, name) if name in questions else 0
        before = dict(seen)
        seen.clear()
        look(asked)
        assert seen.items() >= before.items(), f"got {seen}, expected what was there: {before}"
        # Killed with the next rewrite, or once all are there.
        wanted = len(expected) if life == 2 else min(len(seen) + 1, 3 * len(texts))
        start = time.monotonic()
        while len(seen) < wanted:
          assert time.monotonic() - start < 600, f"got {seen}, expected {wanted} rewrites"
          time.sleep(rng.random() * 0.05)
          look(asked)
        if life == 2:
          last = sum(tokens_of(asked, name) for name in questions)
    finally:
      process.end(signal.SIGKILL)
    if not life:
      _, _, header = next(lines.scan(directory / contexts_lib.EVENTS))
      expected = _slept_alone(tmp_path / "alone", Identity(**header["identity"]), texts)
    assert seen.items() <= expected.items()
    events["killed asleep"] += len(seen) < len(expected)
  # No finished job has been repeated.
  kinds = [record["kind"] for _, _, record in lines.scan(directory / contexts_lib.EVENTS)]
  assert kinds.count("rewrite") == len(expected)
  assert seen == expected and last < first
  events |= {"rewrites": len(seen), "tokens before sleep": first, "tokens after it": last}
  tell_events("kill -9 of a server", events, ("killed asleep", "rewrites"))


@pytest.mark.parametrize(
  "path, body, status, message",
  [
    ("contexts", {"text": "a"}, 400, "name: got nothing, expected a value; name the context"),
    ("contexts", {"name": "", "text": "a"}, 400, "name: got '', expected 1 to 200 printable char"),
    ("contexts", {"name": "c"}, 400, "text: got nothing, expected a value; send the text"),
    ("contexts", {"name": "c", "text": " "}, 400, "contexts: got an empty context 'c', expected a"),
    ("contexts", {"name": "c", "text": "a" * 99}, 400, "tokens, expected at most 58: the context "),
    ("contexts", {"name": "c", "text": "a", "ttl_steps": 0}, 400, "ttl_steps: got 0, expected 1 t"),
    ("contexts", {"name": "c", "text": "a", "x": 1}, 400, "x: got a field that is not supported, "),
    ("contexts?model=big", {"name": "c", "text": "a"}, 404, "model: got 'big', expected one of ti"),
    ("chat/completions", {"context": "no"}, 404, "context: got 'no', which this caller has not"),
    (
      "chat/completions", {"context": "c", "messages": [*user("a"), *user("b")]}, 400,
      "context: got it with 2 messages and 0 tools, expected one user message, the question",
    ),
    (
      "chat/completions", {"context": "c", "messages": [{"role": "system", "content": "a"}]}, 400,
      "context: got it with 1 messages and 0 tools, expected one user message, the question",
    ),
  ],
)  # fmt: skip
def test_what_is_no_context_is_refused(tmp_path_factory, refusing, path, body, status, message):
  if path.startswith("chat"):
    body = {"messages": [*user("Who?")], **body}
  answer = refusing.post(f"/v1/{path}", json=body)
  assert answer.status_code == status and message in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory):
  with running(tmp_path_factory.mktemp("refusing")) as (_, url), client(url) as found:
    yield found


def test_a_server_without_contexts_says_so():
  with serving.running() as (_, url), client(url) as asked:
    for answer in (asked.get("/v1/contexts"), chat(asked)):
      assert answer.status_code == 404
      assert "which has no contexts, expected one of none" in answer.json()["error"]["message"]


def test_a_file_of_tenants_is_read_by_line(tmp_path):
  path = tmp_path / "tenants"
  path.write_text("ana tok-a\n\nbo  tok-b\n")
  assert serve_main.tenants_of(str(path)) == KEYS and serve_main.tenants_of("") == {}
  for text in ("ana tok-a\nbo", "ana tok-a\nana tok-b", "ana tok-a\nbo tok-a"):
    path.write_text(text)
    with pytest.raises(ValueError, match="tenants_file: got line 2 of .*, expected NAME TOKEN; co"):
      serve_main.tenants_of(str(path))
