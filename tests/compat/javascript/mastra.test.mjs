// Mastra's agents, by the address of a model: no package of a provider.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";
import { ADA, ANSWER, check, gathered, HELLO, MODEL, open, SUNNY, WEATHER } from "./gate.mjs";

const get_weather = createTool({
  id: "get_weather",
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (city === "Tokyo" ? SUNNY : "?"),
});

function agentOf({ baseURL, apiKey }, tools = {}) {
  const model = { id: `headgate/${MODEL}`, url: baseURL, apiKey };
  return new Agent({ id: "weather", name: "weather", instructions: "Be short.", model, tools, maxRetries: 0 });
}

test("a reply", async (t) => {
  const episode = await open(t.name);
  assert.equal((await agentOf(episode).generate("hello")).text, HELLO);
  await check(episode, 1);
});

test("a stream", async (t) => {
  const episode = await open(t.name);
  assert.equal(await gathered((await agentOf(episode).stream("hello")).textStream), HELLO);
  await check(episode, 1);
});

test("an agent with a tool is one path", async (t) => {
  const episode = await open(t.name);
  assert.equal((await agentOf(episode, { get_weather }).generate(WEATHER)).text, ANSWER);
  await check(episode, 2);
});

test("a typed reply", async (t) => {
  const schema = z.object({ name: z.string(), age: z.number().int() });
  const done = await agentOf(await open(t.name)).generate(ADA, { structuredOutput: { schema } });
  assert.deepEqual(done.object, { name: "Ada", age: 36 });
});
