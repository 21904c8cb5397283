// The @anthropic-ai/sdk package: messages, streams, its runner of tools, thinking, counts, errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { ANSWER, check, CITY, HELLO, MODEL, open, SUNNY, WEATHER } from "./gate.mjs";

const clientOf = ({ root, apiKey }) => new Anthropic({ baseURL: root, apiKey, maxRetries: 0 });
const asking = (content) => ({ model: MODEL, max_tokens: 200, messages: [{ role: "user", content }] });

test("a reply with its usage, and its prompt's count", async (t) => {
  const episode = await open(t.name);
  const client = clientOf(episode);
  const { messages } = asking("hello");
  const counted = await client.messages.countTokens({ model: MODEL, messages });
  const done = await client.messages.create(asking("hello"));
  assert.deepEqual(done.content.map((block) => block.text), [HELLO]);
  assert.equal(done.stop_reason, "end_turn");
  assert.equal(done.usage.input_tokens, counted.input_tokens);
  await check(episode, 1);
});

test("a stream with thinking", async (t) => {
  const client = clientOf(await open(t.name));
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const stream = client.messages.stream({ ...asking("think aloud, hello"), max_tokens: 2048, thinking });
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const done = await stream.finalMessage();
  assert.deepEqual(done.content.map((block) => block.type), ["thinking", "text"]);
  assert.equal(done.content[0].thinking.trim(), "Let me see.");
  assert.equal(text, HELLO);
});

test("a conversation with a tool is one path", async (t) => {
  const episode = await open(t.name);
  const client = clientOf(episode);
  const tools = [{ name: "get_weather", description: "The weather.", input_schema: CITY }];
  const request = { ...asking(WEATHER), tools };
  const first = await client.messages.stream(request).finalMessage();
  const [use] = first.content.filter((block) => block.type === "tool_use");
  assert.deepEqual(use.input, { city: "Tokyo" });
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: SUNNY }] };
  const messages = [...request.messages, { role: "assistant", content: first.content }, result];
  const second = await client.messages.create({ ...request, messages });
  assert.equal(second.content[0].text, ANSWER);
  await check(episode, 2);
});

test("errors are the package's own", async (t) => {
  const client = clientOf(await open(t.name));
  await assert.rejects(client.messages.create({ ...asking("hello"), model: "no-such-model" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...asking("hello"), temperature: 9 }), Anthropic.BadRequestError);
});
