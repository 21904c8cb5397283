"""The main job, small: a model learns sums behind an agent that knows nothing of headgate."""
