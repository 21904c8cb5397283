"""What tests start and talk to: gateways, clusters, servers, engines, weights and agents; no tests."""
