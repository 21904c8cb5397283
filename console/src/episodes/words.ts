/** Numbers, times and links in the views' words. Pure. */

import { href } from "../router";

export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function count(value: number, one: string, many = `${one}s`): string {
  return `${value.toLocaleString("en-US")} ${value === 1 ? one : many}`;
}

export function seconds(value: number): string {
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const two = (value: number) => String(value).padStart(2, "0");

/** A moment in the reader's time: with the day only if it is another than today. */
export function moment(at: number, now = Date.now()): string {
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString("en-GB");
  return new Date(now).toDateString() === date.toDateString() ? time : `${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

/** A part of a sentence, with the address it leads to. */
export interface Part {
  text: string;
  href?: string;
}

/** A sentence of `why`, with links for the batches and versions in it: to the episodes of a batch that was trained, to where others fill. */
export function linked(words: string): Part[] {
  const parts: Part[] = [];
  let at = 0;
  for (const match of words.matchAll(/\b(batch|version) (\d+)/g)) {
    if (match.index > at) parts.push({ text: words.slice(at, match.index) });
    const open = match[1] === "batch" && !words.slice(0, match.index).endsWith("trained in ");
    const to = open ? href("staleness") : href("episodes", { [match[1]!]: match[2] });
    parts.push({ text: match[0], href: to });
    at = match.index + match[0].length;
  }
  if (at < words.length) parts.push({ text: words.slice(at) });
  return parts;
}
