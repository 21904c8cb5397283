"""Messages to token ids (`renderer`), and token ids to messages as they are sampled (`segmenter`)."""
