"""Tokens that an episode's model saw and sampled: the token tree (pure), and the recorder that fills it and stores it."""
