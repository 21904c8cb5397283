import { Empty } from "../parts/notice";

export function EpisodeView({ id }: { id: string }) {
  return (
    <>
      <h1>Episode {id}</h1>
      <Empty>This view is being built.</Empty>
    </>
  );
}
