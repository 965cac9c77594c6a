"""Clients are kept apart by the names of their keys, and share one named prefix."""

import asyncio
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready
from support.fake_engine_client import INFO, FakeClient, ask
from support.fake_settings import fake_settings
from support.frontend_harness import serving
from support.small_tokenizers import smollm2

from overlap_spec.client.link import pack_ids
from overlap_spec.config import ApiKeys, EngineConfig, IsolationSettings, Machine, ModelFiles
from overlap_spec.config.resolve import resolve, settled_flags
from overlap_spec.config.resolve.server import FEW_NAMES, MOST_BYTES, resolve_isolation
from overlap_spec.errors import ConfigError
from overlap_spec.features.isolation.frontend import IsolationHook, len_in_common, shared_prompts
from overlap_spec.features.isolation.scheduler import BLOCK, UnsharedTokens
from overlap_spec.frontend.client_messages import owned
from overlap_spec.frontend.service import stats_reply
from overlap_spec.messages import Admit, Cancel, GetStats, Stats, Terms
from overlap_spec.scheduler.requests import Request

TWO = ApiKeys({"k1": "alice", "k2": "bob", "k3": "alice"}, admin="root")
ONE = ApiKeys({"k1": "alice", "k3": "alice"}, admin="root")


FILES = ModelFiles(
    weights="/none", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=512, vocab_size=128,
    preset_draft="/head", preset_spec=("EAGLE3", 3, 1, 4),
)  # fmt: skip


def resolved(keys: ApiKeys, **flags: Any) -> tuple[IsolationSettings, list[str]]:
    notes: list[str] = []
    return resolve_isolation(EngineConfig(**flags), keys, notes)[0], notes


def test_two_names_are_isolated_and_the_log_tells() -> None:
    settings, (note,) = resolved(TWO)
    assert settings == IsolationSettings(("alice", "bob"))
    assert "alice, bob" in note and "--shared-prefix" in note and "--no-isolate-clients" in note
    ngrams = {"speculative_algorithm": "NGRAM", "speculative_ngram_external_corpus_path": "texts"}
    found, (_, corpus) = resolved(TWO, **ngrams)
    assert found == settings and "corpus" in corpus
    many = ApiKeys({f"k{i}": f"name{i}" for i in range(FEW_NAMES + 2)})
    assert "and 2 more" in resolved(many)[1][0]


@pytest.mark.parametrize("keys", [ApiKeys(), ONE], ids=["none", "one, and the operator's"])
def test_one_name_shares_as_before(keys: ApiKeys) -> None:
    assert resolved(keys) == (IsolationSettings(), [])


def test_isolated_clients_have_an_operator() -> None:
    """Without a key for one, the engine makes one up that no client knows."""
    notes: list[str] = []
    without = replace(TWO, admin=None)
    made_up = [resolve_isolation(EngineConfig(), without, notes)[1] for _ in range(2)]
    assert len({keys.admin for keys in made_up}) == 2 and all(len(keys.admin or "") > 30 for keys in made_up)
    assert made_up[0].names == TWO.names and "--admin-api-key" in notes[1] and made_up[0].admin not in str(notes)
    assert resolve_isolation(EngineConfig(), TWO, [])[1] == TWO
    shared = EngineConfig(isolate_clients=False)
    assert resolve_isolation(shared, without, [])[1] == without, "as it is where they share"
    assert resolve_isolation(EngineConfig(), ApiKeys({"k1": "alice"}), [])[1].admin is None


def test_settings_of_isolated_clients_name_the_operator_everywhere() -> None:
    machine = Machine(num_cores=2, has_cuda=False)
    settings, _ = resolve(EngineConfig(), FILES, machine, replace(TWO, admin=None))
    admin = settings.server.keys.admin
    assert admin and admin == settings.link.admin_key == settings.link.api_key, "the HTTP process shows it on the link"
    assert admin not in str(settled_flags(EngineConfig(), settings))
    assert resolve(EngineConfig(isolate_clients=False), FILES, machine, TWO)[0].server.keys == TWO


def test_flags_turn_it_on_and_off() -> None:
    settings, (note,) = resolved(TWO, isolate_clients=False)
    assert not settings.names and "are not isolated" in note
    assert resolved(ONE, isolate_clients=True)[0].names == ("alice",)
    with pytest.raises(ConfigError, match="--api-key-file") as refused:
        resolved(ApiKeys(admin="root"), isolate_clients=True)
    assert refused.value.field == "isolate_clients"


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (None, "cannot be read"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff", "not UTF-8"),
        (b"x" * 2**21, "more than"),
    ],
)
def test_a_bad_shared_prefix_is_refused_by_name(tmp_path: Path, content: bytes | None, wrong: str) -> None:
    path = tmp_path / "prefix"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=wrong) as refused:
        resolved(TWO, shared_prefix=str(path))
    assert refused.value.field == "shared_prefix"


def test_a_shared_prefix_needs_isolated_clients_and_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    path.write_bytes(b"x" * MOST_BYTES)
    assert len(resolved(TWO, shared_prefix=str(path))[0].shared_prefix) == MOST_BYTES
    for keys, flags in (ONE, {}), (TWO, {"skip_tokenizer_init": True}):
        with pytest.raises(ConfigError, match="--shared-prefix"):
            resolved(keys, shared_prefix=str(path), **flags)


def admitted(hook: IsolationHook, key: str, salt: str = "", prompt: tuple[int, ...] = (1, 2, 3)) -> Admit:
    request = cast(Any, SimpleNamespace(terms=Terms(key=key)))
    return hook.admission(request, replace(make_admit(1, list(prompt)), salt=salt))


def test_no_two_clients_have_one_salt() -> None:
    """Whatever salts they send: a NUL ends the name, and no client can send one."""
    hook = IsolationHook(())
    asked = [(key, salt) for key in ("a", "ab", "line 1") for salt in ("", "b", "a", "ab", "line 1")]
    salts = {admitted(hook, key, salt).salt for key, salt in asked}
    assert len(salts) == len(asked) and all("\0" in salt for salt in salts)
    assert admitted(hook, "", "b").salt == "b" and admitted(hook, "").salt == "", "the server's own"


def test_what_two_prompts_have_in_common() -> None:
    shared = pack_ids(range(100, 140))
    for count in (0, 1, 7, 39, 40):
        assert len_in_common(pack_ids([*range(100, 100 + count), 5, 6]), shared) == count
        assert len_in_common(pack_ids(range(100, 100 + count)), shared) == count, "a prompt that ends there"
    assert len_in_common(pack_ids([356]), pack_ids([100])) == 0, "they differ in one byte"
    hook = IsolationHook((pack_ids([1, 2, 9]), pack_ids([1, 2, 3, 4])))
    assert admitted(hook, "a").public_len == 3 and admitted(hook, "").public_len == 0


def test_a_system_prompt_is_shared_up_to_what_the_user_says() -> None:
    codec, text = smollm2(), "You are a careful clerk of the city archive. Answer in one line."
    plain, chat = shared_prompts(codec, text)
    assert list(shared_prompts(codec, "")) == []
    assert list(array("i", plain)) == codec.encode(text, True)
    shown = codec.decode(array("i", chat).tolist(), False)
    assert text in shown and "user" in shown.partition(text)[2] and not shown.endswith(("a", "1"))


def test_every_request_of_a_key_is_admitted_with_its_name() -> None:
    async def main() -> None:
        async with serving() as harness:
            isolation = IsolationSettings(("alice", "bob"), "the sky is")
            harness.attach(link=replace(fake_settings().link, isolation=isolation))
            for key in ("alice", "bob", ""):
                harness.generate("the sky is blue", f"r{key}", terms=Terms(key=key))
            admits = [await harness.admitted() for _ in range(3)]
            assert [admit.salt for admit in admits] == ["alice\0", "bob\0", ""]
            assert admits[0].public_len == admits[1].public_len >= 3 and admits[2].public_len == 0

    asyncio.run(main())


@pytest.mark.parametrize("request_id", ["", "hers"])
@pytest.mark.parametrize("pretended", [None, "", "alice", "admin"])
def test_a_cancel_is_that_of_its_connections_key(request_id: str, pretended: str | None) -> None:
    sent = Cancel(request_id, True, "", pretended)
    assert owned(sent, "bob") == Cancel(request_id, True, "", "bob"), "whatever it sends"
    assert owned(sent, None) == sent, "a gateway's"


def test_the_count_is_told_to_the_operator_alone() -> None:
    """Who guesses what another has sent would see that he hit."""
    stats = Stats(unshared_tokens_total=64)
    told = [stats_reply(GetStats("s", key), stats).stats for key in (None, "admin", "bob", "")]
    assert [each.unshared_tokens_total for each in told] == [64, 64, 0, 0]
    assert owned(GetStats("s", "admin"), "bob") == GetStats("s", "bob"), "whatever it sends"
    client, info = FakeClient(statistics=stats), replace(INFO, keys=ApiKeys({"kb": "bob"}, "ko"))
    shown = [ask(client, "GET", "/metrics", info, headers={"x-api-key": key}).text for key in ("kb", "ko")]
    assert ["unshared" in text for text in shown] == [False, True]
    assert "overlap_spec:unshared_tokens_total 64.0" in shown[1]


def unshared(hook: UnsharedTokens, tokens: list[int], salt: str, public_len: int = 0) -> int:
    before = hook.total
    admit = replace(make_admit(1, tokens), salt=salt, public_len=public_len)
    assert not hook.admitted(cast(Request, SimpleNamespace(admit=admit)))
    return hook.total - before


def test_tokens_that_sharing_would_have_found_are_counted() -> None:
    hook, tokens = UnsharedTokens(100 * BLOCK), list(range(3 * BLOCK + 5))
    assert unshared(hook, tokens, "a\0") == 0
    assert unshared(hook, tokens, "a\0") == 0, "its own"
    assert unshared(hook, tokens, "b\0own") == 0, "its salt says that it shares nothing"
    assert unshared(hook, [*tokens[: 2 * BLOCK], *tokens], "b\0") == 2 * BLOCK
    assert unshared(hook, tokens, "b\0") == BLOCK, "the third one"
    assert unshared(hook, tokens, "b\0") == 0
    assert unshared(hook, [9, *tokens[1:]], "c\0") == 0, "later blocks follow another one"
    assert unshared(hook, tokens, "c\0", public_len=BLOCK) == 2 * BLOCK, "the others are shared"


def test_what_is_known_of_prompts_is_bounded() -> None:
    hook, tokens = UnsharedTokens(4 * BLOCK), list(range(2 * BLOCK))
    unshared(hook, tokens, "a\0")
    for number in range(9):
        unshared(hook, [number] * BLOCK, "a\0")
    assert len(hook._senders) == 4 and unshared(hook, tokens, "b\0") == 0


def test_clients_of_an_engine_share_the_prefix_alone() -> None:
    bench = Bench(make_ready(page_size=4, num_pages=60))
    prompt = list(range(10, 40))
    cached = {}
    for uid, (name, public_len) in enumerate([("a", 0), ("b", 0), ("a", 0), ("c", 16), ("d", 16), ("e", 5)], 1):
        bench.admit(replace(make_admit(uid, prompt, 2), salt=f"{name}\0", public_len=public_len))
        bench.finish_all()
        cached[uid] = bench.usages[uid].cached_tokens
    assert list(cached.values()) == [0, 0, 28, 0, 12, 4], "the key of a page has the token after it"
