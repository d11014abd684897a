"""Which Host headers are accepted, and which limits."""

import pytest

from tests.support.serving import build_small_app
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.serve.limits import HostCheck, LimitError, Limits


@pytest.mark.parametrize(
    ("bound", "allowed", "accepted", "refused"),
    [
        ("127.0.0.1", (), ["localhost:1", "127.0.0.1", "[::1]:1"], ["a.example", "10.0.0.1", ""]),
        ("10.0.0.1", (), ["10.0.0.1:80", "LOCALHOST"], ["10.0.0.2", "a.example"]),
        ("::1", (), ["[::1]", "localhost."], ["[::2]:80", "[::1].a.example"]),
        ("0.0.0.0", (), ["10.0.0.1:80", "[fe80::1]:80", "localhost"], ["a.example", "10.0.0"]),
        ("::", (), ["10.0.0.1:80", "[fe80::1]:80"], ["a.example", ""]),
        ("::0", (), ["10.0.0.1:80", "[fe80::1]:80"], ["a.example", ""]),
        ("0.0.0.0", ("",), ["10.0.0.1"], ["", "a.example"]),  # as for --host ''
        ("localhost", ("A.Example:80",), ["a.example", "a.example:99"], ["b.example"]),
        ("127.0.0.1", ("any",), ["a.example", ""], []),
    ],
)
def test_the_host_must_be_one_of_this_machine(bound, allowed, accepted, refused):
    check = HostCheck.of(bound, allowed)
    assert [host for host in accepted if not check.accepts(host)] == []
    assert [host for host in refused if check.accepts(host)] == []


def test_the_key_is_not_shown():
    assert "secret" not in repr(Limits(api_key="secret"))
    with pytest.raises(LimitError) as error:
        Limits(api_key="secret secret")
    assert "secret" not in str(error.value)


def test_an_open_server_without_a_key_is_warned_of(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TOKENFORMER_API_KEY", raising=False)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    byte_tokenizer().save_pretrained(tmp_path)
    command = ["serve", str(tmp_path), "--port", "0", "--host"]
    for host, options, warned in [
        ("0.0.0.0", [], True),
        ("0.0.0.0", ["--api_key", "12345", "--allowed_hosts", "any"], False),
        ("", [], True),
        ("127.0.0.1", [], False),
    ]:
        with pytest.raises(SystemExit):  # there are no weights
            main([*command, host, *options])
        assert ("anyone who can reach" in capsys.readouterr().err) == warned


def test_no_header_lets_other_sites_read_answers():
    from starlette.testclient import TestClient

    app, encoder = build_small_app()
    with TestClient(app, base_url="http://localhost") as client:
        origin = {"Origin": "http://attacker.example"}
        preflight = {**origin, "Access-Control-Request-Method": "POST"}
        for response in (
            client.get("/v1/models", headers=origin),
            client.options("/v1/completions", headers=preflight),
        ):
            assert not [name for name in response.headers if "access-control" in name]
    encoder.close()


def test_health_is_answered_for_any_host():
    """A load balancer asks by an address, or by no name at all."""
    from starlette.testclient import TestClient

    app, encoder = build_small_app()
    with TestClient(app, base_url="http://10.0.0.1") as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 403
    encoder.close()
