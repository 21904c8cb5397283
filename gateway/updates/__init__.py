"""Updates of engines: the steps of one, the check of a version, and the ways that weights reach an engine."""
