// An episode, as a JavaScript client's test uses it: gate.py in JavaScript. The gateway and the engine come from the environment.

import assert from "node:assert/strict";

export const MODEL = "demo";
export const HELLO = "Hello from the scripted engine.";
export const WEATHER = "What is the weather in Tokyo?";
export const SUNNY = "sunny, 24 degrees";
export const ANSWER = `The answer is ${SUNNY}.`;
export const ADA = "Make a person named Ada who is 36 years old";
export const CITY = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

const GATEWAY = process.env.HEADGATE_COMPAT_GATEWAY;
const ENGINE = process.env.HEADGATE_COMPAT_ENGINE;

/** Opens an episode: `baseURL` with /v1, `root` without. */
export async function open(task) {
  const opened = await json(`${GATEWAY}/admin/v1/episodes`, { task_id: task, mode: "eval" });
  return { id: opened.episode_id, baseURL: opened.base_url, root: GATEWAY, apiKey: opened.api_key };
}

/** Check that the record has this number of turns on one path, each with what the engine got and sampled. */
export async function check(episode, turns) {
  const { nodes } = await json(`${GATEWAY}/admin/v1/episodes/${episode.id}/trajectory`);
  const sampled = nodes.filter((node) => node.sampled);
  assert.equal(sampled.length, turns);
  assert.deepEqual(nodes.map((node) => node.parent), nodes.map((_, i) => i - 1));
  for (const node of sampled) {
    const known = Object.values(await json(`${ENGINE}/compat/requests?prefix=${node.call_id}`));
    const path = pathTo(nodes, node);
    assert.ok(
      known.some((kept) => equal(kept.prompt, path) && equal(kept.sampled.slice(0, node.ids.length), node.ids)),
      `the engine was never given the path to node ${node.index} of ${episode.id}`,
    );
  }
}

export async function gathered(parts, text = (part) => part) {
  let all = "";
  for await (const part of parts) all += text(part) ?? "";
  return all;
}

function pathTo(nodes, node) {
  let ids = [];
  while (node.parent >= 0) {
    const parent = nodes[node.parent];
    ids = [...parent.ids.slice(0, node.at), ...ids];
    node = parent;
  }
  return ids;
}

const equal = (left, right) => left.length === right.length && left.every((id, i) => id === right[i]);

async function json(url, body) {
  const method = body ? "POST" : "GET";
  const answer = await fetch(url, { method, body: body && JSON.stringify(body), headers: { "content-type": "application/json" } });
  assert.ok(answer.ok, `${url}: ${answer.status}`);
  return answer.json();
}
