#!/bin/sh
# An agent of curl and sh. Its exit status is its reward: 0 is 1.0, and 1 is 0.0.
#
# gateway episodes run --tasks examples/agents/tasks.jsonl --group-size 4 --exit-code-reward -- sh examples/agents/curl.sh
set -eu

body=$(python3 -c '
import json, os
task = json.loads(os.environ["HEADGATE_TASK"])
ask = task["question"] + " Answer with the number alone."
print(json.dumps({"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": ask}]}))')

# --fail-with-body ends with 22 where the gateway refuses: that is a failure, and no reward.
curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
    --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" --data "$body" |
    python3 -c '
import json, os, sys
answer = json.load(sys.stdin)["choices"][0]["message"]["content"] or ""
sys.exit(answer.strip() != json.loads(os.environ["HEADGATE_TASK"])["answer"])'
