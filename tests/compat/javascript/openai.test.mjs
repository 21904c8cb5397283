// The openai package: chat completions, responses, streams, tools, a typed reply, errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { ADA, ANSWER, check, CITY, gathered, HELLO, MODEL, open, SUNNY, WEATHER } from "./gate.mjs";

const clientOf = ({ baseURL, apiKey }) => new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const user = (content) => ({ role: "user", content });

test("a reply with its usage", async (t) => {
  const episode = await open(t.name);
  const done = await clientOf(episode).chat.completions.create({ model: MODEL, messages: [user("hello")] });
  assert.equal(done.choices[0].message.content, HELLO);
  assert.ok(done.usage.completion_tokens > 0);
  await check(episode, 1);
});

test("streams of both APIs", async (t) => {
  const client = clientOf(await open(t.name));
  const chat = await client.chat.completions.create({ model: MODEL, messages: [user("count to 5")], stream: true });
  assert.equal(await gathered(chat, (chunk) => chunk.choices[0]?.delta.content), "1, 2, 3, 4, 5");
  const events = await client.responses.create({ model: MODEL, input: "count to 5", stream: true });
  const deltas = await gathered(events, (e) => (e.type === "response.output_text.delta" ? e.delta : ""));
  assert.equal(deltas, "1, 2, 3, 4, 5");
});

test("a runner of tools is one path", async (t) => {
  const episode = await open(t.name);
  const weather = { name: "get_weather", description: "The weather.", parameters: CITY, parse: JSON.parse };
  const tools = [{ type: "function", function: { ...weather, function: ({ city }) => (city === "Tokyo" ? SUNNY : "?") } }];
  const runner = clientOf(episode).chat.completions.runTools({ model: MODEL, messages: [user(WEATHER)], tools, stream: true });
  assert.equal(await runner.finalContent(), ANSWER);
  await check(episode, 2);
});

test("responses with tools and previous_response_id are one path", async (t) => {
  const episode = await open(t.name);
  const client = clientOf(episode);
  const tools = [{ type: "function", name: "get_weather", description: "The weather.", parameters: CITY, strict: false }];
  const first = await client.responses.create({ model: MODEL, input: WEATHER, tools });
  const [call] = first.output.filter((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Tokyo" });
  const input = [{ type: "function_call_output", call_id: call.call_id, output: SUNNY }];
  const second = await client.responses.create({ model: MODEL, input, tools, previous_response_id: first.id });
  assert.equal(second.output_text, ANSWER);
  await check(episode, 2);
});

test("a typed reply", async (t) => {
  const schema = { ...CITY, properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] };
  const response_format = { type: "json_schema", json_schema: { name: "person", strict: true, schema } };
  const done = await clientOf(await open(t.name)).chat.completions.create({ model: MODEL, messages: [user(ADA)], response_format });
  assert.deepEqual(JSON.parse(done.choices[0].message.content), { name: "Ada", age: 36 });
});

test("errors are the package's own, and models are listed", async (t) => {
  const client = clientOf(await open(t.name));
  await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages: [user("hello")] }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ model: MODEL, messages: [user("hello")], temperature: 9 }), OpenAI.BadRequestError);
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes(MODEL));
});
