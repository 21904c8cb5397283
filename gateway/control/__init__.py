"""The host of the control program (`host`), the served models (`models`), their versions, the nodes, and placement."""
