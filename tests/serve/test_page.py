"""The page at "/": its permissions, and its behaviour in a real browser."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import subprocess
import sys

import chromium
import pytest
import serving

from seerjax.serve import page
from seerjax.serve.config import ServeConfig

TEXT = page.FILE.read_text()
SECRET = ServeConfig(port=0, token="tok-server", tenants={"tok-a": "ana"})
# A question that fits a context of 64 tokens, asked alongside 64 others.
QUESTION = "How many?"
HOSTILE = "<img src=x onerror=document.title='gone'><script>document.title='gone'</script>"


def test_the_page_is_served_to_all_and_holds_no_data():
  with serving.running(SECRET) as (_, url), serving.client(url) as plain:
    found = plain.get("/")
    assert (found.status_code, found.text) == (200, TEXT)
    assert found.headers["content-type"].startswith("text/html")
    assert "tiny" not in found.text and "fp_test" not in found.text
    assert plain.get("/v1/models").status_code == plain.get("/metrics").status_code == 401
    policy = found.headers["content-security-policy"]
  assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
  for kind in ("script", "style"):
    (part,) = re.findall(f"<{kind}>(.*?)</{kind}>", TEXT, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
    assert f"{kind}-src 'sha256-{digest}';" in policy


def test_the_page_asks_the_network_for_nothing_and_makes_no_markup_of_text():
  names = [*re.findall(r"https?://[^\s\"'`)]+", TEXT)]
  assert {*names} <= {"http://www.w3.org/2000/svg"}  # An XML namespace, which is not fetched.
  for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "@import",
              "Function(", "src=", "style=", "onclick="):  # fmt: skip
    assert way not in TEXT, way
  assert len(TEXT.encode()) < 64 << 10


def test_every_input_has_a_label():
  inputs = re.findall(r"<(?:input|select|textarea) id=\"(\w+)\"", TEXT)
  assert len(inputs) >= 9
  assert {*inputs} == {*re.findall(r"<label [^>]*for=\"(\w+)\"", TEXT)}


def test_another_script_would_have_another_digest():
  # Twin: a policy does not cover a script that it was not made for.
  assert page.policy(TEXT) != page.policy(TEXT.replace('"use strict";', '"use strict"; alert(1);'))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  if not chromium.found():
    pytest.skip("got no Chromium, expected one: apt-get install chromium")
  with chromium.tab(tmp_path_factory.mktemp("browser")) as tab:
    yield tab


@pytest.mark.thorough
def test_without_a_browser_a_session_ends_by_saying_what_it_did_not_run():
  name = test_an_answer_has_one_digest_alone_and_beside_64_others.__name__
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-n0", "-pno:cacheprovider", f"{__file__}::{name}"],
    env={**os.environ, "PATH": ""}, capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert re.search(r"^SKIPPED \[1\] .*: got no Chromium, expected one", done.stdout, re.MULTILINE)
  assert done.returncode == 0 and "1 skipped" in done.stdout, done.stdout


def ask(tab: chromium.Tab, question: str) -> None:
  tab.run(f"$('question').value = {question!r}; $('ask').requestSubmit()")
  tab.wait("!running && $('log').lastChild.querySelector('.proof, .note')")


def digest(choice: dict) -> str:
  """Returns the digest as the guide defines it."""
  data = choice["message"]["content"].encode()
  for row in choice["logprobs"]["content"]:
    data += struct.pack("<Iff", row["token_id"], row["logprob"], row["raw_logprob"])
  return hashlib.sha256(data).hexdigest()


def test_an_answer_has_one_digest_alone_and_beside_64_others(browser):
  tab = browser
  with serving.running() as (service, url), serving.client(url) as plain:
    tab.size(1280, 800)
    tab.go(f"{url}/")
    tab.wait("$('models').children.length")
    tab.run("$('seed').value = '7'; $('most').value = '24'")
    ask(tab, QUESTION)
    body = {"messages": serving.HELLO, "seed": 7, "max_tokens": 24, "logprobs": True}
    (expected,) = plain.post("/v1/chat/completions", json=body).json()["choices"]
    assert (
      tab.run("$('log').querySelector('article .text').textContent")
      == (expected["message"]["content"])
    )
    shown = "[...document.querySelectorAll('[data-digest]')].map(one => one.dataset.digest)"
    assert tab.run(shown) == [digest(expected)]
    before = service.thread.engines["tiny"].counters.sampled_tokens
    tab.run("document.querySelector('.again').click()")
    tab.wait("document.querySelector('.verdict.same, .verdict.bad')")
    assert tab.run("document.querySelector('.verdict').textContent") == (
      "Same digest: identical to the last bit"
    )
    assert tab.run(shown) == [digest(expected)] * 2
    # Others were present: more tokens were sampled than this response's.
    tokens = len(expected["logprobs"]["content"])
    assert service.thread.engines["tiny"].counters.sampled_tokens - before > tokens
    (num_others,) = map(int, re.findall(r"with (\d+)", tab.run("$('log').innerText")))
    assert num_others >= 32
    tab.wait("$('flight').textContent === '0'")  # The others have ended.
    # The twin: another seed has another digest.
    tab.run("$('fresh').click(); $('seed').value = '8'")
    ask(tab, QUESTION)
    assert tab.run(shown) != [digest(expected)]
    # A foreign text stays text, and no response is built from it.
    tab.run("$('fresh').click()")
    ask(tab, HOSTILE)
    assert tab.run("$('log').querySelector('.user .text').textContent") == HOSTILE
    assert tab.run("$('log').querySelectorAll('img, script').length") == 0
    assert tab.run("document.title") == "SeerJAX"
    tab.run("$('heat').value = '-1'")
    ask(tab, QUESTION)
    assert "temperature: got -1" in tab.run("$('log').lastChild.innerText")
    for width in (375, 1280):
      for is_dark in (False, True):
        tab.size(width, 700, is_dark=is_dark)
        assert tab.run("document.documentElement.scrollWidth") <= width
        ground = tab.run("getComputedStyle(document.body).backgroundColor")
        assert is_dark == (sum(map(int, re.findall(r"\d+", ground))) < 380)
  assert tab.errors == []


@pytest.mark.thorough
def test_a_server_with_a_token_is_entered_by_it(browser):
  tab = browser
  tab.size(1280, 800)
  with serving.running(SECRET) as (_, url):
    tab.go(f"{url}/")
    tab.wait("!$('door').hidden")
    assert tab.run("$('rooms').hidden && $('refused').hidden && !$('models').children.length")
    for token, is_right in (("wrong", False), ("tok-a", True)):
      tab.run(f"$('token').value = '{token}'; $('door').requestSubmit()")
      tab.wait("!$('refused').hidden" if not is_right else "!$('rooms').hidden")
    assert tab.run("$('models').innerText").startswith("tiny")
    tab.run("$('most').value = '4'")
    ask(tab, QUESTION)
    assert tab.run("document.querySelectorAll('[data-digest]').length") == 1
    assert tab.run("$('gauges').hidden")  # A tenant may not read the metrics.
    tab.run("sessionStorage.clear()")
