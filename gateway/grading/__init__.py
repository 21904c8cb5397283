"""Graders: they compute a reward when an episode is closed without one.

    [graders.right]
    function = "my_package.graders:right"     # imported by worker processes, in the folder in which the gateway is started
    workers = 4

    [graders.short]
    url = "http://127.0.0.1:9000/grade"       # POST, the episode as JSON
    weight = 0.1
    models = ["actor"]

    [graders.polite]
    judge = "critic"                          # a model of this gateway that is not trained
    criteria = { tone = "The reply is polite." }

    [graders.better]
    judge = "critic"
    reference_key = "reference"               # the key of the episode's metadata with the text to compare with

A grader is a Python function, run in worker processes (`function`); a URL (`url`); a rubric by which a judge scores (`criteria`);
or a comparison that a judge decides (`reference_key`). `grading` has their registry. A function and a URL get the episode
(`episode_view`):

    {"episode_id", "task_id", "group_id", "model",
     "metadata":   what the episode was opened with,
     "calls":      [{"call_id", "model", "requested", "finish_reason", "reward"}, ...]   every call, oldest first; `requested` has
                   the parameters, and `reward` is what was posted on the call (or null),
     "turns":      [{"call_id", "prompt_text", "text", "next_text"}, ...]   what the episode's model was given and sampled, and
                   what followed (the user's next message, results of tools; empty after the last turn), oldest first, marks of
                   the template included, abandoned turns left out,
     "final_text": the text of the last turn; empty if there is none}

and give a number: a function returns it, a URL returns `{"reward": number}`. A grader that has no opinion gives
`{"reward": None}`: if none has one and nothing was posted, the episode is left out of training (`not_judged`). With
`{"reward": ..., "calls": {"CALL": number}}` they state which part of it single calls earned, and that becomes the reward of
those calls. The episode's reward is the sum of the scores times their weights, plus what was posted on its other calls.
`grading` owns the graders and repeats failed requests.
"""
