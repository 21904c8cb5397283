import { render } from "preact";
import { expect, test } from "vitest";
import { TimelineView } from "../../src/episodes/timeline-view";
import type { EpisodeAnswer } from "../../src/episodes/types";

test("an episode whose calls were all refused shows them", () => {
  const refused = { at: 12, api: "chat", model: "demo", status: 400, code: "context_length_exceeded", message: "too long", times: 3 };
  const episode = { created_at: 10, closed_at: 20, state: "closed", calls: [], refused_calls: [refused] } as unknown as EpisodeAnswer;
  const box = document.createElement("div");
  render(<TimelineView episode={episode} table={null} now={20} />, box);
  for (const part of ["400 context_length_exceeded", "too long", "3"]) expect(box.textContent).toContain(part);
  render(<TimelineView episode={{ ...episode, refused_calls: [] }} table={null} now={20} />, box);
  expect(box.textContent).toBe("No call was made in this episode.");
});
