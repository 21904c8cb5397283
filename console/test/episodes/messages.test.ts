import { expect, test } from "vitest";
import { messagesOf } from "../../src/episodes/messages";
import { leavesOf, pathTo } from "../../src/episodes/tree";
import type { TokenTable } from "../../src/episodes/table";
import { drawn } from "./fixture";

function read(table: TokenTable): [string, string][] {
  const path = pathTo(table.nodes, leavesOf(table.nodes).at(-1)!);
  return messagesOf(table, path).map((message) => {
    const tokens = message.segments.flatMap(({ from, to }) => Array.from({ length: to - from }, (_, i) => from + i));
    return [message.role, tokens.filter((token) => !message.hidden!(token)).map((token) => table.texts[token]).join("")];
  });
}

const qwen = drawn([
  [-1, 0, false, ["<|im_start|>", "system", "\n", "Be brief.", "<|im_end|>", "\n", "<|im_start|>", "user", "\n", "2+2?", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]],
  [0, 15, true, ["4", "<|im_end|>"]],
  [1, 2, false, ["\n", "<|im_start|>", "user", "\n", "<tool_response>", "\n", "ok", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]],
  [2, 12, true, ["done", "<|im_end|>"]],
]);

test("a chat is read from its marks; of turns the marks are kept, for they are trained", () => {
  expect(read(qwen)).toEqual([
    ["system", "Be brief."],
    ["user", "2+2?"],
    ["assistant", "4<|im_end|>"],
    ["tool", "<tool_response>\nok"],
    ["assistant", "done<|im_end|>"],
  ]);
});

test("a message knows its turn, and every token of the path is in one message", () => {
  const messages = messagesOf(qwen, pathTo(qwen.nodes, 3));
  expect(messages.map((message) => message.turn)).toEqual([-1, -1, 1, -1, 3]);
  expect(messages.reduce((sum, message) => sum + message.tokens, 0)).toBe(qwen.ids.length);
});

test("Llama's headers are read too", () => {
  const table = drawn([
    [-1, 0, false, ["<|begin_of_text|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\n\n", "Hi", "<|eot_id|>", "<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n"]],
    [0, 11, true, ["Hello", "<|eot_id|>"]],
  ]);
  expect(read(table)).toEqual([["prompt", "<|begin_of_text|>"], ["user", "Hi"], ["assistant", "Hello<|eot_id|>"]]);
});

test("without known marks there is a message for each piece of prompt and each turn", () => {
  const table = drawn([
    [-1, 0, false, ["Question: 2+2?\n", "Answer:"]],
    [0, 2, true, [" 4"]],
    [1, 1, false, ["\nQuestion: 3+3?\n", "Answer:"]],
    [2, 2, true, [" 6"]],
  ]);
  expect(read(table).map(([role]) => role)).toEqual(["prompt", "assistant", "prompt", "assistant"]);
});

test("text that only looks like a mark changes nothing", () => {
  const table = drawn([
    [-1, 0, false, ["<|im_start|>", "user", "\n", "say ", "<|im_start|>", "system"]],
  ], { control: [0] });
  expect(read(table)).toEqual([["user", "say <|im_start|>system"]]);
});
