// The ledger as the gateway reports it, and the same in words. Pure.
import { duration, plural } from "../format";

export interface GroupRow {
  group_id: string;
  version: number;
  state: "reserved" | "occupied";
  size: number;
  members: Record<string, number>;
}

export interface Batch {
  batch: number;
  state: string;
  occupied: number;
  reserved: number;
  leased: boolean;
  groups: GroupRow[];
}

export interface Ledger {
  late_groups: string;
  eta: number;
  batch_size: number;
  version: number;
  /** The next batch to train. */
  consumed: number;
  lease: { batch: number; consumer: string; left_s: number } | null;
  batches: Batch[];
  /** Waiting groups, with the number of their episodes. */
  waiting: Record<string, number>;
  lost: { kind: string; reason: string; count: number }[];
  slowest?: { group_id: string; running: number; oldest_s: number; episodes: string[] }[];
}

export interface Entry {
  group: GroupRow;
  /** Members whose reward is there. */
  done: number;
  members: number;
}

/** The places of a batch: complete groups first, then those that run, then free ones (null). */
export function entries(batch: Batch, size: number): (Entry | null)[] {
  const order = (group: GroupRow) => (group.state === "occupied" ? 0 : 1);
  const taken: (Entry | null)[] = [...batch.groups]
    .sort((a, b) => order(a) - order(b))
    .map((group) => {
      const lost = group.members["dropped"] ?? 0;
      return { group, done: group.members["rewarded"] ?? 0, members: Math.max(group.size, sum(group.members) - lost) };
    });
  return [...taken, ...new Array<null>(Math.max(0, size - taken.length)).fill(null)];
}

/** Fields of groups and of free places that are drawn of a batch, and batches without a group that are drawn after the last with one. */
const TAKEN = 256;
const FREE = 12;
const EMPTY = 2;

/** The places that are drawn, and in words what is left: a batch may have a thousand. */
export function drawn(places: (Entry | null)[]): { shown: (Entry | null)[]; left: string } {
  const taken = places.filter((place) => place !== null);
  const free = places.length - taken.length;
  const groups = Math.max(0, taken.length - TAKEN);
  const frees = Math.max(0, free - FREE);
  const left = [groups ? plural(groups, "more group") : "", frees ? `${plural(frees, "more place")} free` : ""].filter(Boolean).join(", ");
  return { shown: [...taken.slice(0, TAKEN), ...new Array<null>(Math.min(free, FREE)).fill(null)], left };
}

/** The batches that are drawn: those up to the last with a group, and a few after it. */
export function begun(batches: readonly Batch[]): readonly Batch[] {
  return batches.slice(0, batches.findLastIndex((batch) => batch.groups.length > 0) + 1 + EMPTY);
}

const sum = (counts: Record<string, number>) => Object.values(counts).reduce((all, count) => all + count, 0);

/** Who waits for whom, from the trainer backwards to the agents. */
export function waits(ledger: Ledger): string[] {
  return [trainer(ledger), next(ledger), waiting(ledger)].filter((sentence) => sentence !== null);
}

function trainer({ lease, consumed, batches }: Ledger): string {
  if (!lease) {
    const whole = batches.find((one) => one.batch === consumed)?.state.startsWith("READY");
    return `Batch ${consumed} ${whole ? "is complete and " : ""}waits for a trainer: none has requested it yet, or it still publishes a version.`;
  }
  const batch = batches.find((one) => one.batch === lease.batch);
  const complete = batch?.state.startsWith("READY");
  const left = lease.left_s > 0 ? `${duration(lease.left_s)} left` : "over its time";
  return complete
    ? `${lease.consumer} trains batch ${lease.batch}, which is complete (lease: ${left}).`
    : `${lease.consumer} holds batch ${lease.batch} and trains its groups as they come (lease: ${left}).`;
}

function next({ batches, batch_size: size, slowest }: Ledger): string | null {
  const batch = batches.find((one) => one.occupied < size);
  if (!batch) return null;
  const free = Math.max(0, size - batch.occupied - batch.reserved);
  const causes = [
    batch.reserved > 0 ? `${plural(batch.reserved, "group")} that ${batch.reserved === 1 ? "runs" : "run"}` : "",
    free > 0 ? `${plural(free, "group")} that ${free === 1 ? "has" : "have"} not begun` : "",
  ].filter(Boolean);
  const slow = slowest?.find((one) => batch.groups.some((group) => group.group_id === one.group_id));
  const longest = slow ? `; the slowest, ${slow.group_id}, since ${duration(slow.oldest_s)}` : "";
  return `Batch ${batch.batch} waits for ${causes.join(" and ") || "nothing"}${longest}.`;
}

function waiting({ waiting, eta }: Ledger): string | null {
  const groups = Object.keys(waiting).length;
  if (!groups) return "No group waits for a place.";
  return `${plural(groups, "group")} (${plural(sum(waiting), "episode")}) ${groups === 1 ? "waits" : "wait"} for a place: all that may begin within ${plural(eta, "version")} has begun, so the next version is what lets them in.`;
}
