/** Pages of a long list that lives on the server: which ones to ask for, and which to keep.
 *
 * Pure but for its own memory. The list's length is pinned by the list that owns it; rows that are not there yet are undefined.
 */

export class Pages<T> {
  private readonly pages = new Map<number, readonly T[]>();
  private readonly requested = new Set<number>();

  constructor(
    readonly size: number,
    /** Pages that are kept; the ones used longest ago go first. */
    readonly most = 40,
  ) {}

  /** The pages for rows [from, to) that are neither there nor requested; from now on they are requested. */
  missing(from: number, to: number): number[] {
    const found: number[] = [];
    for (let page = Math.floor(from / this.size); page * this.size < to; page++) {
      if (!this.pages.has(page) && !this.requested.has(page)) {
        this.requested.add(page);
        found.push(page);
      }
    }
    return found;
  }

  put(page: number, rows: readonly T[]): void {
    this.requested.delete(page);
    this.pages.delete(page);
    this.pages.set(page, rows);
    for (const old of this.pages.keys()) {
      if (this.pages.size <= this.most) break;
      this.pages.delete(old);
    }
  }

  /** A response did not come: the page may be requested again. */
  failed(page: number): void {
    this.requested.delete(page);
  }

  row(index: number): T | undefined {
    const page = Math.floor(index / this.size);
    const rows = this.pages.get(page);
    return rows?.[index - page * this.size];
  }

  /** Changes each row that is here; a row that stays the same is returned as it is. */
  update(change: (row: T) => T): boolean {
    let changed = false;
    for (const [page, rows] of this.pages) {
      const next = rows.map(change);
      if (next.some((row, i) => row !== rows[i])) {
        this.pages.set(page, next);
        changed = true;
      }
    }
    return changed;
  }
}

/** The rows [from, to) to draw: those in sight and some around them. */
export function windowOf(top: number, height: number, rowHeight: number, count: number, around: number): [number, number] {
  const from = Math.max(0, Math.floor(top / rowHeight) - around);
  const to = Math.min(count, Math.ceil((top + height) / rowHeight) + around);
  return [Math.min(from, count), Math.max(to, 0)];
}
