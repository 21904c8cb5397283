// @openai/agents, with its models for chat completions and for responses.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { ANSWER, check, CITY, gathered, HELLO, MODEL, open, SUNNY, WEATHER } from "./gate.mjs";

setTracingDisabled(true);
const get_weather = tool({
  name: "get_weather",
  description: "The weather in a city.",
  parameters: CITY,
  strict: true,
  execute: async ({ city }) => (city === "Tokyo" ? SUNNY : "?"),
});

for (const Model of [OpenAIChatCompletionsModel, OpenAIResponsesModel]) {
  const modelOf = ({ baseURL, apiKey }) => new Model(new OpenAI({ baseURL, apiKey, maxRetries: 0 }), MODEL);

  test(`${Model.name}: a reply`, async (t) => {
    const episode = await open(t.name);
    const agent = new Agent({ name: "plain", instructions: "Be short.", model: modelOf(episode) });
    assert.equal((await run(agent, "hello")).finalOutput, HELLO);
    await check(episode, 1);
  });

  for (const stream of [false, true]) {
    test(`${Model.name}: an agent with a tool is one path${stream ? ", streamed" : ""}`, async (t) => {
      const episode = await open(t.name);
      const agent = new Agent({ name: "weather", instructions: "Use tools.", model: modelOf(episode), tools: [get_weather] });
      const done = await run(agent, WEATHER, { stream });
      if (stream) assert.match(await gathered(done.toTextStream()), /sunny/);
      assert.equal(done.finalOutput, ANSWER);
      await check(episode, 2);
    });
  }
}
