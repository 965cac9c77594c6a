// Starts the parts of the page.

import { Chat } from "./chat.js";
import { LivePanel } from "./live.js";
import { startSettings } from "./settings.js";
import { Timeline } from "./timeline.js";

const live = [];
startSettings(() => live.forEach((panel) => panel.restart())); // first: requests need the key
new Chat();
live.push(new LivePanel(), new Timeline());
