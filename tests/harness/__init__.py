"""The things that tests start and talk to: gateways, clusters, servers, engines, weights and agents. No tests."""
