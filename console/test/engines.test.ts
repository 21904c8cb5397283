import { expect, test } from "vitest";
import { leave } from "../src/engines/actions";
import { beginOf, endOf, updatesOf, type Timeline } from "../src/engines/types";

const TOLD: Timeline = {
  from: 0,
  to: 170,
  engines: [{ name: "e", node: null, spans: [{ state: "open", version: 1, reason: "", from: 100, to: null }] }],
  nodes: [],
  versions: [{ model: "m", version: 1, published_at: null, live_at: 150 }],
};

test("a timeline begins with what is known and ends where the gateway says; that of one moment has a width", () => {
  expect(beginOf(TOLD)).toBe(100);
  expect(endOf(TOLD)).toBe(170);
  expect(endOf({ ...TOLD, to: 100 })).toBe(101);
});

test("a version that no engine reports has a row, each engine's report has one, and only the newest is live", () => {
  const version = { state: "live", created_at: 1, live_at: 2, bad: "" };
  const report = { engine: "e", streams: 3, seconds: { load: 1 }, failure: "", proof: { verdict: "proven", why: "" }, probe: { verdict: "passed", gap: 0.1, margin: 0.9 } };
  const rows = updatesOf([{ ...version, version: 0, report: [] }, { ...version, version: 1, report: [report, { ...report, engine: "f", probe: null }] }]);
  expect(rows.map((row) => row.state)).toEqual(["replaced", "live", "live"]);
  expect(rows.map((row) => [row.version, row.engine, row.margin, row.proof, row.verdict])).toEqual([[0, "", null, "", ""], [1, "e", 0.9, "proven", "passed"], [1, "f", null, "proven", ""]]);
});

test("before an engine is paused or drained, it is said where its calls go", () => {
  const said = (streams: number, pinned: number, others: number) => leave({ streams, pinned }, others, "end there first");
  expect(said(0, 0, 1)).toBe("No call runs in it.");
  expect(said(1, 0, 1)).toBe("Its 1 running call goes on in another engine from its last token.");
  expect(said(3, 2, 2)).toBe("Its 3 running calls go on in other engines from their last token; 2 pinned to it end there first.");
  expect(said(2, 0, 0)).toBe("Its 2 running calls wait with what was sampled, until an engine is open.");
});
