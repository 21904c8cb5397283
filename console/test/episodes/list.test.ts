import { afterEach, expect, test, vi } from "vitest";
import { EpisodeList } from "../../src/episodes/list";
import { NO_FILTERS } from "../../src/episodes/query";
import type { GatewayEvent } from "../../src/live";

const row = (i: number) => ({ episode_id: `ep-${i}`, state: "open", reason: "", reward: null });
let asked: URL[] = [];

/** A gateway with so many episodes; a page is asked for by its place. */
function serve(total: number): void {
  asked = [];
  vi.stubGlobal("fetch", (address: string) => {
    const url = new URL(address);
    asked.push(url);
    const offset = Number(url.searchParams.get("offset"));
    const episodes = Array.from({ length: Math.min(100, total - offset) }, (_, i) => row(offset + i));
    return Promise.resolve(Response.json({ episodes, next: null, total, pin: `pin-${asked.length}` }));
  });
}

const event = (kind: string, episode: string, data: object = {}): GatewayEvent => ({ id: 1, at: 7, kind, episode, data: { ...data } });

afterEach(() => vi.unstubAllGlobals());

test("pages in the middle are asked for by place, under the pin of the first", async () => {
  serve(100_000);
  const list = new EpisodeList(NO_FILTERS);
  await vi.waitUntil(() => list.total.value === 100_000);
  list.seen(50_090, 50_110);
  await vi.waitUntil(() => list.row(50_105));
  expect(list.row(50_105)!.episode_id).toBe("ep-50105");
  expect(asked.slice(1).map(({ searchParams }) => [searchParams.get("offset"), searchParams.get("pin")])).toEqual([
    ["50000", "pin-1"],
    ["50100", "pin-1"],
  ]);
  list.stop();
});

test("an episode that closes changes its row where it stands", async () => {
  serve(3);
  const list = new EpisodeList(NO_FILTERS);
  await vi.waitUntil(() => list.total.value === 3);
  const before = list.changes.value;
  list.apply([event("episode.closed", "ep-1", { reason: "rewarded", reward: 0.5 }), event("episode.closed", "ep-99")]);
  expect(list.row(1)).toMatchObject({ state: "closed", reason: "rewarded", reward: 0.5, closed_at: 7 });
  expect(list.row(0)).toMatchObject({ state: "open" });
  expect(list.changes.value).toBe(before + 1);
  list.stop();
});

test("what is opened below the reader's sight is counted, and moves nothing", async () => {
  serve(500);
  vi.useFakeTimers({ toFake: ["setTimeout"] });
  const list = new EpisodeList(NO_FILTERS);
  vi.useRealTimers();
  await vi.waitUntil(() => list.total.value === 500);
  vi.useFakeTimers({ toFake: ["setTimeout"] });
  list.seen(200, 240);
  list.apply([event("episode.opened", "ep-new"), event("episode.opened", "ep-newer")]);
  vi.advanceTimersByTime(60_000);
  vi.useRealTimers();
  expect(list.fresh.value).toBe(2);
  expect(asked.filter((url) => url.searchParams.get("pin") === null)).toHaveLength(1);
  list.stop();
});
