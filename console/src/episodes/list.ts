/** The list of episodes as the page knows it: its pinned length, the pages that came, and what happened since.
 *
 * Positions belong to one pin, so nothing moves under the reader while episodes are opened; `renew` takes a new pin. An event of an
 * episode that is here changes its row immediately.
 */

import { signal } from "@preact/signals";
import { get, messageOf } from "../api";
import { is, type GatewayEvent } from "../live";
import { Pages } from "./pages";
import { apiParameters, type Filters } from "./query";
import type { EpisodePage, EpisodeRow } from "./types";

const PAGE = 100;
/** Milliseconds between two renewals while the reader is at the top. */
const EVERY_MS = 2_000;

export class EpisodeList {
  /** Null: the first response has not come. */
  readonly total = signal<number | null>(null);
  readonly error = signal<string | null>(null);
  /** Counts changes of rows: what draws rows reads it. */
  readonly changes = signal(0);
  /** Episodes that were opened since the pin. */
  readonly fresh = signal(0);

  private pages = new Pages<EpisodeRow>(PAGE);
  private pin = "";
  private sight: [number, number] = [0, 0];
  private readonly gone = new AbortController();
  private timer = 0;
  private renewing = false;

  constructor(private readonly filters: Filters) {
    void this.renew();
  }

  row(index: number): EpisodeRow | undefined {
    return this.pages.row(index);
  }

  get atTop(): boolean {
    return this.sight[0] === 0;
  }

  stop(): void {
    this.gone.abort();
    clearTimeout(this.timer);
  }

  /** Begins again with what is there now; the old rows stay until it has come. */
  async renew(): Promise<void> {
    if (this.renewing) return;
    this.renewing = true;
    this.fresh.value = 0;
    try {
      const response = await this.ask(0, "");
      this.pages = new Pages(PAGE);
      this.pin = response.pin ?? "";
      this.pages.put(0, response.episodes);
      this.total.value = response.total ?? response.episodes.length;
      this.error.value = null;
      this.changes.value++;
      this.seen(...this.sight);
    } catch (failure) {
      if (!this.gone.signal.aborted) this.error.value = messageOf(failure);
    } finally {
      this.renewing = false;
    }
  }

  /** Asks for the pages of the rows in sight. */
  seen(from: number, to: number): void {
    this.sight = [from, to];
    if (this.total.value === null) return;
    const pages = this.pages;
    for (const page of pages.missing(from, Math.min(to, this.total.value))) {
      this.ask(page, this.pin).then(
        (response) => {
          pages.put(page, response.episodes);
          this.changes.value++;
        },
        (failure) => {
          pages.failed(page);
          if (!this.gone.signal.aborted) this.error.value = messageOf(failure);
        },
      );
    }
  }

  /** Takes in what happened. */
  apply(events: readonly GatewayEvent[]): void {
    const about = new Map<string, Partial<EpisodeRow>>();
    let opened = 0;
    for (const event of events) {
      if (is(event, "episode.opened")) opened++;
      const change = changeOf(event);
      if (change && event.episode) about.set(event.episode, { ...about.get(event.episode), ...change });
    }
    if (about.size && this.pages.update((row) => (about.has(row.episode_id) ? { ...row, ...about.get(row.episode_id) } : row)))
      this.changes.value++;
    this.fresh.value += opened;
    const forgot = events.some((event) => is(event, "gap"));
    if ((opened || forgot) && !this.timer) {
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        if (this.atTop || forgot) void this.renew();
      }, EVERY_MS);
    }
  }

  private ask(page: number, pin: string): Promise<EpisodePage> {
    // The length is counted once: with the pin it stays.
    const query = { ...Object.fromEntries(apiParameters(this.filters)), limit: PAGE, offset: page * PAGE, calls: true, preview: true, total: pin === "", pin };
    return get<EpisodePage>("/admin/v1/episodes", query, this.gone.signal);
  }
}

/** What an event changes in its episode's row; null: nothing that the list shows. */
export function changeOf(event: GatewayEvent): Partial<EpisodeRow> | null {
  if (is(event, "episode.grading")) return { state: "grading" };
  if (!is(event, "episode.closed")) return null;
  const { reason, reward } = event.data as { reason: string; reward: number | null };
  return { state: "closed", reason, reward, closed_at: event.at };
}
