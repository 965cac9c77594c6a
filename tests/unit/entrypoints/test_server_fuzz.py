"""Junk in every field of every endpoint: an answer or an error that names the field, and nothing that goes on."""

import asyncio
import json

import httpx
import pytest
from support.fake_engine_client import INFO, FakeClient, healthy
from support.junk_bodies import BODIES, bodies

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.errors import ANTHROPIC

ALSO = {("input_ids", "text"), ("messages", "prompt")}  # two fields exclude one another: the other one is named


@pytest.mark.full_but_every(2)
@pytest.mark.parametrize("one_in", [14, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", BODIES)
def test_junk_is_answered_or_refused_by_the_fields_name(path: str, one_in: int) -> None:
    async def inner() -> set[int]:
        client, seen = FakeClient(), set()
        transport = httpx.ASGITransport(create_app(client, INFO, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            for name, body in bodies(path)[::one_in]:
                answer = await http.post(path, content=json.dumps(body))
                seen.add(answer.status_code)
                assert not client.running, (name, body)
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    if path.startswith(ANTHROPIC):
                        assert error.keys() == {"message", "type"} and name in error["message"], (name, body, error)
                        continue
                    assert error.keys() == {"message", "type", "param", "code"}
                    assert answer.status_code == (404 if error["code"] == "model_not_found" else 400), (body, error)
                    named = error["param"] == name or (name, error["param"]) in ALSO
                    assert named, (name, body, error)
        return seen

    assert asyncio.run(inner()) <= {200, 400, 404}
