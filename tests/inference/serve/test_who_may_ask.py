"""Foreign pages, names that are not this machine's, tokens, and what the page is allowed to load."""

import re
import sys
from pathlib import Path

import httpx
import pytest

from speakernet.inference.serve.running import TOKEN_VARIABLE, Address, ServeError, read_token

sys.path.insert(0, str(Path(__file__).parent))
from serve_helpers import serving, wav

PAGE = Path(__file__).resolve().parents[3] / "speakernet" / "inference" / "serve" / "page"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_pages_of_other_sites_may_not_ask(server, method, headers):
    answer = server.request(method, "/people", headers=headers)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_page"
    assert "access-control-allow-origin" not in answer.headers


def test_our_own_page_may_and_a_link_to_it_is_no_harm(server, voices):
    own = {"origin": str(server.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
    assert server.post("/embed", files={"audio": wav(voices[0][0])}, headers=own).status_code == 200
    assert server.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "192.168.0.1"])
def test_a_name_that_was_bent_to_this_machine_is_refused(server, host):
    answer = server.get("/people", headers={"host": host})
    assert answer.status_code in (400, 421)
    assert server.get("/health", headers={"host": "localhost:1234"}).status_code == 200


def test_a_token_guards_everything_but_the_page(models, tmp_path):
    token = "a-token-of-some-length"
    with serving(models[0], tmp_path / "people.db", token=token) as (address, _), httpx.Client(base_url=address) as it:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {token}x"}):
            for path in ("/people", "/openapi.json", "/streams/x", "/nothing"):
                answer = it.get(path, headers=given)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "token_needed")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert it.get("/people", headers={"authorization": f"Bearer {token}"}).json() == {"people": []}
        assert it.get("/").status_code == it.get("/page.js").status_code == it.get("/health").status_code == 200


def test_tokens_are_made_where_others_can_reach_the_server(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token(Address("127.0.0.1", 0), None) == read_token(Address("::1", 0), None) == ""
    first, second = (read_token(Address("0.0.0.0", 0), None) for _ in range(2))
    assert len(first) >= 24 and first != second
    (tmp_path / "token").write_text("0123456789abcdef\n")
    assert read_token(Address("0.0.0.0", 0), tmp_path / "token") == "0123456789abcdef"
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ServeError, match="a token of 5 characters; expected 16 or more"):
        read_token(Address("localhost", 0), None)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ServeError, match="is empty"):
        read_token(Address("0.0.0.0", 0), tmp_path / "token")


def test_addresses_that_cannot_be_had_are_refused():
    taken = Address("127.0.0.1", 0).listen()
    with pytest.raises(ServeError, match=r"127.0.0.1 port \d+: .*choose another --port"):
        Address("127.0.0.1", taken.getsockname()[1]).listen()
    taken.close()
    with pytest.raises(ServeError, match="choose another --port"):
        Address("no.such.host.invalid", 0).listen()
    with pytest.raises(ServeError, match="expected 0 to 65535"):
        Address("127.0.0.1", 70000).listen()


def test_the_page_asks_nobody_else(server):
    for path in ("/", "/page.css", "/page.js", "/recorder.js"):
        answer = server.get(path)
        assert answer.status_code == 200
        assert not re.search(r"(https?:)?//[\w.-]+\.\w", answer.text), path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "http" not in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert {path.name for path in PAGE.iterdir()} == {"page.html", "page.css", "page.js", "recorder.js"}
