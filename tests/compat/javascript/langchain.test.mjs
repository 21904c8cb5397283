// LangChain.js: ChatOpenAI on chat completions and on responses, ChatAnthropic, and LangGraph's agent with a tool.

import assert from "node:assert/strict";
import { test } from "node:test";
import { ChatAnthropic } from "@langchain/anthropic";
import { tool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { ADA, ANSWER, check, CITY, gathered, HELLO, MODEL, open, SUNNY, WEATHER } from "./gate.mjs";

const openai = (useResponsesApi) => ({ baseURL, apiKey }) =>
  new ChatOpenAI({ model: MODEL, apiKey, configuration: { baseURL }, useResponsesApi, maxRetries: 0 });
const MODELS = {
  "ChatOpenAI": openai(false),
  "ChatOpenAI on responses": openai(true),
  "ChatAnthropic": ({ root, apiKey }) => new ChatAnthropic({ model: MODEL, apiKey, anthropicApiUrl: root, maxRetries: 0 }),
};
const PERSON = { ...CITY, title: "person", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] };
const get_weather = tool(async ({ city }) => (city === "Tokyo" ? SUNNY : "?"), {
  name: "get_weather",
  description: "The weather in a city.",
  schema: CITY,
});

for (const [name, modelOf] of Object.entries(MODELS)) {
  test(`${name}: a reply with its usage`, async (t) => {
    const episode = await open(t.name);
    const done = await modelOf(episode).invoke("hello");
    assert.equal(done.text, HELLO);
    assert.ok(done.usage_metadata.output_tokens > 0);
    await check(episode, 1);
  });

  test(`${name}: a stream`, async (t) => {
    const parts = await modelOf(await open(t.name)).stream("count to 5");
    assert.equal(await gathered(parts, (part) => part.text), "1, 2, 3, 4, 5");
  });

  test(`${name}: a typed reply`, async (t) => {
    const typed = modelOf(await open(t.name)).withStructuredOutput(PERSON);
    assert.deepEqual(await typed.invoke(ADA), { name: "Ada", age: 36 });
  });

  for (const streamed of [false, true]) {
    test(`${name}: an agent with a tool is one path${streamed ? ", streamed" : ""}`, async (t) => {
      const episode = await open(t.name);
      const agent = createReactAgent({ llm: modelOf(episode), tools: [get_weather] });
      const input = { messages: [{ role: "user", content: WEATHER }] };
      let state;
      if (streamed) {
        for await (const [mode, part] of await agent.stream(input, { streamMode: ["messages", "values"] })) {
          if (mode === "values") state = part;
        }
      } else {
        state = await agent.invoke(input);
      }
      assert.equal(state.messages.at(-1).text, ANSWER);
      await check(episode, 2);
    });
  }
}
