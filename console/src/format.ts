// How figures, times and durations are written.
import { moment } from "./episodes/words";
import { short } from "./parts/chart";

export { short };

export function share(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  const percent = value * 100;
  return `${percent !== 0 && Math.abs(percent) < 10 ? +percent.toPrecision(2) : Math.round(percent)} %`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.001 && seconds > 0) return "<1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 5_400) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172_800) return `${+(seconds / 3_600).toPrecision(3)} h`;
  return `${+(seconds / 86_400).toPrecision(3)} days`;
}

export const clock = (at: number | null | undefined) => (at == null ? "–" : moment(at));

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}
