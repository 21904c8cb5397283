import { expect, test } from "vitest";
import { replyOf, lastLine, questionOf } from "../../src/episodes/preview";
import { filtersOf, NO_FILTERS, searchOf } from "../../src/episodes/query";
import { wordsOf } from "../../src/episodes/saved";

test("the question is the last message of the user, whatever the template", () => {
  const prompts = [
    "ller.<|im_end|>\n<|im_start|>user\nWhat is\n3 + 4?<|im_end|>\n<|im_start|>assistant\n",
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 3 + 4?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "<｜User｜>What is 3 + 4?<｜Assistant｜>",
    "an unknown template: What is 3 + 4?",
  ];
  expect(prompts.map(questionOf)).toEqual([...new Array(3).fill("What is 3 + 4?"), "an unknown template: What is 3 + 4?"]);
});

test("the answer comes without its reasoning and the template's marks", () => {
  expect(replyOf("<think>\n3 and 4\n</think>\n\n7<|im_end|>")).toBe("7");
  expect(replyOf("<think>still thin")).toBe("<think>still thin");
});

test("of a traceback the last line is shown", () => {
  expect(lastLine("Traceback (most recent call last):\n  ...\nValueError: no such tool\n\n")).toBe("ValueError: no such tool");
  expect(lastLine("")).toBe("");
});

test("a saved filter is found again, and named by what it filters", () => {
  const filters = { ...NO_FILTERS, reason: "agent_failed", version: "3..5", since: 12, sort: "longest" };
  const search = searchOf(filters);
  expect(filtersOf(new URLSearchParams(search))).toEqual(filters);
  expect(wordsOf(search)).toBe("reason agent_failed, version 3..5, sort longest, a part of the time");
});
