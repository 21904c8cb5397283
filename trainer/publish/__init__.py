"""How a version's weights reach the gateway."""
