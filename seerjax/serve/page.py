"""Serves the chat page at "/": one file that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import pathlib
import re

from starlette.responses import Response

FILE = pathlib.Path(__file__).parent / "page.html"


def response() -> Response:
  """Returns the page. It contains no data; its requests for data carry the client's token."""
  text = FILE.read_text()
  return Response(
    text,
    media_type="text/html",
    headers={
      "content-security-policy": policy(text),
      "referrer-policy": "no-referrer",
      "x-content-type-options": "nosniff",
      "cache-control": "no-cache",
    },
  )


def policy(text: str) -> str:
  """Returns the content security policy: only the page's own script, style and server."""
  sources = {
    kind: " ".join(
      f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
      for part in re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    )
    for kind in ("script", "style")
  }
  return (
    f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']};"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
  )
