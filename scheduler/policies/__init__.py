"""Pure decisions of the form (state, event) -> commands: no I/O, no clock, the standard library alone."""
