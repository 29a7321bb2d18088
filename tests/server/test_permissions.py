from djinn_server.hookspecs.weight_sources import WeightPermissions
from djinn_server.weights.permissions import allows


def test_allows_matches_the_host_of_a_pattern_with_hosts_only():
    permissions = WeightPermissions((), ("https://*.example.org/m/*", "hf://org/*", "s3://*", "gs://b"))
    assert allows(permissions, "https://a.example.org/m/x.bin")
    assert not allows(permissions, "https://evil.org/.example.org/m/x.bin")
    assert not allows(permissions, "https://evil.org/x.example.org/m/x.bin")
    assert not allows(permissions, "https://a.example.org/n/m/x.bin")
    assert not allows(permissions, "http://a.example.org/m/x.bin")
    assert not allows(permissions, "https://evil.org?.example.org/m/x.bin")
    assert not allows(permissions, "https://evil.org#.example.org/m/x.bin")
    assert allows(permissions, "hf://org/model@main/x")
    assert not allows(permissions, "hf://other/org/model")
    assert allows(permissions, "s3://any/thing/at/all")
    assert allows(permissions, "gs://b")
    assert not allows(permissions, "gs://b/x")
    assert allows(WeightPermissions((), ("*",)), "https://x/y")
