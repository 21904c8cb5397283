"""headgate as a service on one machine, without Docker."""
