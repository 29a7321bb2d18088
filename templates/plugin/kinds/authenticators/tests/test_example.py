import djinn_example
import pytest

from djinn.hooks import ConfigurationError, Credentials, Identity
from djinn.testing import AuthenticatorConformance, PluginConformance, wrong_credentials


def prepared(secret="s" * 16):
    made = djinn_example.ExampleAuthenticator(djinn_example.Settings(secret))
    made.prepare()
    return made


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestAuthenticator(AuthenticatorConformance):
    @pytest.fixture
    def authenticator(self):
        return prepared()

    @pytest.fixture
    def accepted(self):
        return {"alice": Credentials(prepared().token("alice"))}

    @pytest.fixture
    def wrong(self):
        return wrong_credentials() | {"another secret": Credentials(prepared("t" * 16).token("alice"))}


def test_the_tenant_is_in_the_token():
    answer = prepared().authenticate(Credentials(prepared().token("alice")))
    assert isinstance(answer, Identity)
    assert answer.tenant == "alice"


def test_a_server_does_not_start_with_a_short_secret():
    with pytest.raises(ConfigurationError, match="16 characters"):
        prepared("short")
