import hashlib

import djinn_example
import pytest

from djinn.hooks import Credentials, Identity
from djinn.testing import AuthenticatorConformance, PluginConformance

TOKEN = "k3jq-0vX9rYwQm2c-t8Zs5bLhN1"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_example


class TestAuthenticator(AuthenticatorConformance):
    @pytest.fixture
    def authenticator(self):
        return djinn_example.ExampleAuthenticator(djinn_example.Settings((f"alice={DIGEST}",)))

    @pytest.fixture
    def accepted(self):
        return {"alice": Credentials(TOKEN)}

    def test_the_tenant_is_that_of_the_digest(self, authenticator):
        answer = authenticator.authenticate(Credentials(TOKEN))
        assert isinstance(answer, Identity)
        assert answer.tenant == "alice"


def test_sessions_end_where_the_digest_is_gone():
    assert not djinn_example.ExampleAuthenticator(djinn_example.Settings()).is_valid(DIGEST[:16])
