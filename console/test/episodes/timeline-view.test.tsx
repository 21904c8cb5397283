import { render } from "preact";
import { expect, test } from "vitest";
import { TimelineView } from "../../src/episodes/timeline-view";
import type { EpisodeResponse } from "../../src/episodes/types";

test("an episode whose calls were all refused shows them", () => {
  const refused = { at: 12, api: "chat", model: "demo", status: 400, code: "context_length_exceeded", message: "too long", times: 3 };
  const episode = { created_at: 10, closed_at: 20, state: "closed", calls: [], refused_calls: [refused] } as unknown as EpisodeResponse;
  const box = document.createElement("div");
  render(<TimelineView episode={episode} table={null} now={20} />, box);
  for (const part of ["400 context_length_exceeded", "too long", "3"]) expect(box.textContent).toContain(part);
  render(<TimelineView episode={{ ...episode, refused_calls: [] }} table={null} now={20} />, box);
  expect(box.textContent).toBe("No call was made in this episode.");
});

test("a reply whose tokens arrived together has no rate", () => {
  const call = {
    call_id: "c", model: "demo", node: -1, api: "chat", engine: "e", finish_reason: "stop", tool_faults: null, reward: null,
    prompt_tokens: 3, completion_tokens: 8, pauses: 0, received_at: 11, queued_s: 0, first_token_s: 1, seconds: 1.0003,
  };
  const episode = { created_at: 10, closed_at: 20, state: "closed", calls: [call, { ...call, call_id: "d", seconds: 3 }] } as unknown as EpisodeResponse;
  const box = document.createElement("div");
  render(<TimelineView episode={episode} table={null} now={20} />, box);
  const heads = [...box.querySelectorAll("th")].map((head) => head.textContent);
  const rates = [...box.querySelectorAll("tbody tr")].map((row) => row.children[heads.indexOf("tokens/s")]!.textContent);
  expect(rates).toEqual(["–", "4"]);
});
