// The AI SDK (`ai`) with its providers: openai-compatible, openai's chat and responses, anthropic.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { ADA, ANSWER, check, CITY, gathered, HELLO, MODEL, open, SUNNY, WEATHER } from "./gate.mjs";

const PROVIDERS = {
  "openai-compatible": ({ baseURL, apiKey }) => createOpenAICompatible({ name: "headgate", baseURL, apiKey, supportsStructuredOutputs: true })(MODEL),
  "openai chat": ({ baseURL, apiKey }) => createOpenAI({ baseURL, apiKey }).chat(MODEL),
  "openai responses": ({ baseURL, apiKey }) => createOpenAI({ baseURL, apiKey }).responses(MODEL),
  anthropic: ({ baseURL, apiKey }) => createAnthropic({ baseURL, apiKey })(MODEL),
};
const PERSON = jsonSchema({
  ...CITY,
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
});
const get_weather = tool({
  description: "The weather in a city.",
  inputSchema: jsonSchema(CITY),
  execute: async ({ city }) => (city === "Tokyo" ? SUNNY : "?"),
});

for (const [name, modelOf] of Object.entries(PROVIDERS)) {
  test(`${name}: a reply with its usage`, async (t) => {
    const episode = await open(t.name);
    const done = await generateText({ model: modelOf(episode), prompt: "hello", maxRetries: 0 });
    assert.equal(done.text, HELLO);
    assert.ok(done.usage.outputTokens > 0);
    await check(episode, 1);
  });

  test(`${name}: a stream`, async (t) => {
    const done = streamText({ model: modelOf(await open(t.name)), prompt: "count to 5", maxRetries: 0 });
    assert.equal(await gathered(done.textStream), "1, 2, 3, 4, 5");
  });

  for (const streamed of [false, true]) {
    test(`${name}: tools are one path${streamed ? ", streamed" : ""}`, async (t) => {
      const episode = await open(t.name);
      const request = { model: modelOf(episode), prompt: WEATHER, tools: { get_weather }, stopWhen: stepCountIs(4), maxRetries: 0 };
      const text = streamed ? await gathered(streamText(request).textStream) : (await generateText(request)).text;
      assert.equal(text, ANSWER);
      await check(episode, 2);
    });
  }

  test(`${name}: a typed reply`, async (t) => {
    const output = Output.object({ schema: PERSON });
    const done = await generateText({ model: modelOf(await open(t.name)), prompt: ADA, output, maxRetries: 0 });
    assert.deepEqual(done.output, { name: "Ada", age: 36 });
  });
}
