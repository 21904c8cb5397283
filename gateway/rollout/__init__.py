"""The engine side of an open request: a call's life across pauses, the engines, and the change of their weights."""
