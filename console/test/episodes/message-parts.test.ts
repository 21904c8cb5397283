import { expect, test } from "vitest";
import { foldedAs, partsOf } from "../../src/episodes/message-parts";
import { messagesOf, textOf, withRefusals } from "../../src/episodes/messages";
import { pathTo } from "../../src/episodes/tree";
import { drawn } from "./fixture";

test("a reply is its reasoning, its prose and its calls, in order", () => {
  const text = '<think>\nlook it up\n</think>\n\nI search.\n<tool_call>\n{"name": "search", "arguments": {"q": "mill"}}\n</tool_call>';
  expect(partsOf(text)).toEqual([
    { kind: "reasoning", text: "look it up" },
    { kind: "text", text: "I search." },
    { kind: "call", name: "search", text: '{\n  "q": "mill"\n}' },
  ]);
});

test("calls in tags, with arguments as a string, broken, or cut off are calls too", () => {
  const call = (body: string) => partsOf(`<tool_call>${body}`)[0];
  expect(call("<function=search>\n<parameter=q>mill</parameter>\n</function>")).toEqual({ kind: "call", name: "search", text: "<parameter=q>mill</parameter>" });
  expect(call('{"name": "search", "arguments": "{\\"q\\": 1}"}')).toEqual({ kind: "call", name: "search", text: '{\n  "q": 1\n}' });
  expect(call('{"name": "sea')).toEqual({ kind: "call", name: "", text: '{"name": "sea' });
});

test("JSON is indented, and text that only begins like it stays as it is", () => {
  expect(partsOf('<tool_response>\n[{"a": 1}]\n</tool_response>')).toEqual([{ kind: "json", text: '[\n  {\n    "a": 1\n  }\n]' }]);
  expect(partsOf("[1] is the source")).toEqual([{ kind: "text", text: "[1] is the source" }]);
});

test("what is long is folded, reasoning always, and short prose never", () => {
  expect(foldedAs({ kind: "text", text: "short" })).toBeNull();
  expect(foldedAs({ kind: "reasoning", text: "short" })).toBe("reasoning, 5 characters");
  expect(foldedAs({ kind: "json", text: "[\n".repeat(40) })).toBe("JSON, 80 characters");
  expect(foldedAs({ kind: "text", text: `begin ${"x".repeat(2_000)}` })).toMatch(/^begin x{114}… \(2,006 characters\)$/);
});

test("refused calls stand before the messages of the call that was answered after them", () => {
  const table = drawn([
    [-1, 0, false, ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]],
    [0, 9, true, ["Hello", "<|im_end|>"]],
    [1, 2, false, ["\n", "<|im_start|>", "user", "\n", "More", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]],
    [2, 10, true, ["Yes"]],
  ]);
  const messages = messagesOf(table, pathTo(table.nodes, 3));
  const refused = [30, 5, 15].map((at) => ({ at, api: "chat", model: "demo", status: 400, code: "c", message: "m", times: 1 }));
  const rows = withRefusals(messages, refused, (turn) => ({ 1: 10, 3: 20 })[turn] ?? null);
  expect(rows.map((row) => ("refused" in row ? row.refused.at : textOf(table, row.message)))).toEqual([5, "Hi", "Hello", 15, "More", "Yes", 30]);
});
